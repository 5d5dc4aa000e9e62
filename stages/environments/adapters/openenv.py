"""OpenEnv: a server's environments over WebSocket, one session per rollout. Runs in the service's own interpreter.

PRORL_OPENENV names the servers: `NAME=URL NAME=URL`. `docs/openenv.md` describes an instance's args. An environment
with tools, or with actions of several required fields, is played by function calls; a text ends it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from prorl_zmq.stages.environments.named_servers import named_server

VARIABLE = "PRORL_OPENENV"
WAIT_S = 1.0
"""Seconds between attempts at a server whose sessions are all taken."""
TOOL_ACTIONS = ("CallToolAction", "ListToolsAction", "Action")


class OpenEnv:
    limit_s = 600.0
    """A session may wait for another one's end."""

    async def open(self, args: dict[str, Any], seed: int | None) -> dict[str, Any]:
        self.show, self.field = args.get("show"), args.get("field", "")
        self.opened, self.reading = AsyncExitStack(), list[asyncio.Task[None]]()
        session = aiohttp.ClientSession(named_server(VARIABLE, args.get("server", "")))
        try:
            self.http = await self.opened.enter_async_context(session)
            async with self.http.get("schema", raise_for_status=True) as answer:
                action = (await answer.json())["action"]
            seen = await self._reset({**args.get("reset", {}), **({} if seed is None else {"seed": seed})})
            return {"observations": {"main": self._text(seen) or "Begin."}, "tools": await self._tools(action)}
        except BaseException:
            await self.close()
            raise

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        while True:
            self.socket = await self.opened.enter_async_context(self.http.ws_connect("ws"))
            self.frames = asyncio.Queue[aiohttp.WSMessage]()
            # It reads always: the server's pings are answered only by who reads, and a turn may take minutes.
            self.reading.append(asyncio.create_task(_read(self.socket, self.frames)))
            seen = await self._ask("reset", data, "CAPACITY_REACHED")
            if "code" not in seen:
                return seen
            await self.socket.close()
            await asyncio.sleep(WAIT_S)  # the server has no queue; the limit of `open` ends the wait

    async def _tools(self, action: dict[str, Any]) -> list[dict[str, Any]]:
        if action.get("title") in TOOL_ACTIONS:
            listed = (await self._ask("step", {"type": "list_tools"}))["observation"]["tools"]
            return [{**tool, "parameters": tool["input_schema"]} for tool in listed]
        required = action.get("required", ())
        self.field = self.field or (required[0] if len(required) == 1 else "")
        fields = {name: about for name, about in action["properties"].items() if name != "metadata"}
        act = {"name": "act", "description": action.get("description", "Act.")}
        return [] if self.field else [{**act, "parameters": {**action, "properties": fields}}]

    async def step(self, player: str, text: str) -> dict[str, Any]:
        return await self._take(player, {self.field: text}) if self.field else {"done": True}

    async def call(self, player: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        tool = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return await self._take(player, arguments if name == "act" else tool)

    async def _take(self, player: str, action: dict[str, Any]) -> dict[str, Any]:
        seen = await self._ask("step", action, "VALIDATION_ERROR")
        if "code" in seen:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in seen.get("errors", ()))
            return {"observations": {player: f"This is not a valid action: {wrong or seen['message']}"}}
        rewards = {} if seen["reward"] is None else {player: seen["reward"]}
        return {"observations": {player: self._text(seen)}, "rewards": rewards, "done": seen["done"]}

    async def _ask(self, kind: str, data: dict[str, Any], expected: str = "") -> dict[str, Any]:
        """Return the data of an answer; an error that is not `expected` is raised."""
        await self.socket.send_json({"type": kind, "data": data})
        frame = await self.frames.get()
        if frame.type != aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the OpenEnv server ended the session: {frame.data or frame.type.name}")
        answer: dict[str, Any] = json.loads(frame.data)["data"]
        if answer.get("code", expected) != expected:
            raise RuntimeError(f"the OpenEnv environment failed: {answer['code']}: {answer.get('message')}")
        return answer

    def _text(self, seen: dict[str, Any]) -> str:
        fields = {name: value for name, value in seen["observation"].items() if value is not None}
        if "tool_name" in fields:  # of a tool's result, its plain value
            result = fields.get("result", fields.get("error"))
            fields = {"result": result.get("data", result) if isinstance(result, dict) else result}
        elif self.show is not None:
            if fields and self.show not in seen["observation"]:
                raise LookupError(f"no field {self.show!r} is in the observation; it has {', '.join(fields)}")
            fields = {self.show: fields.get(self.show, "")}
        only = next(iter(fields.values())) if len(fields) == 1 else fields
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False) if fields else ""

    async def close(self) -> None:
        await self.opened.aclose()
        await asyncio.gather(*self.reading)


async def _read(socket: aiohttp.ClientWebSocketResponse, frames: asyncio.Queue[aiohttp.WSMessage]) -> None:
    while not socket.closed:
        frames.put_nowait(await socket.receive())
