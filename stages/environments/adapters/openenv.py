"""OpenEnv: a server's environments over WebSocket, one session per rollout. Runs in the service's own interpreter.

PRORL_OPENENV names the servers: `NAME=URL NAME=URL`. An instance's args:

- `server`: a name among these; may be left out if there is one.
- `reset`: further arguments of the environment's `reset`.
- `field`: the field of an action that the policy's text goes into; by default the only field that is required.
- `show`: the field of an observation that the policy sees; by default its only field, else all as JSON.

An environment with tools, or with actions of several required fields, is played by function calls; a text ends it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from prorl_zmq.stages.environments.named_servers import named_server

VARIABLE = "PRORL_OPENENV"
WAIT_S = 1.0
"""Seconds between attempts at a server whose sessions are all taken."""
TOOL_ACTIONS = ("CallToolAction", "ListToolsAction", "Action")


async def _read(socket: aiohttp.ClientWebSocketResponse, frames: asyncio.Queue[aiohttp.WSMessage]) -> None:
    while not socket.closed:
        frames.put_nowait(await socket.receive())


class OpenEnv:
    limit_s = 600.0
    """A session may wait for another one's end."""
    reading: asyncio.Task[None] | None = None

    async def open(self, args: dict[str, Any], seed: int | None) -> dict[str, Any]:
        url = named_server(VARIABLE, args.get("server", ""))
        self.show, self.field = args.get("show"), args.get("field", "")
        self.http = aiohttp.ClientSession(url)
        try:
            async with self.http.get("schema", raise_for_status=True) as answer:
                action = (await answer.json())["action"]
            seen = await self._reset({**args.get("reset", {}), **({} if seed is None else {"seed": seed})})
            tools = await self._tools(action)
        except BaseException:
            await self.close()
            raise
        return {"observations": {"main": self._text(seen) or "Begin."}, "tools": tools}

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        while True:
            self.socket = await self.http.ws_connect("ws")
            self.frames = asyncio.Queue[aiohttp.WSMessage]()
            # It reads always: the server's pings are answered only by who reads, and a turn may take minutes.
            self.reading = asyncio.create_task(_read(self.socket, self.frames))
            seen = await self._ask("reset", data)
            if seen.get("code") != "CAPACITY_REACHED":
                return _whole(seen)
            await self._end_session()
            await asyncio.sleep(WAIT_S)  # the server has no queue; the limit of `open` ends the wait

    async def _tools(self, action: dict[str, Any]) -> list[dict[str, Any]]:
        if action.get("title") in TOOL_ACTIONS:
            listed = _whole(await self._ask("step", {"type": "list_tools"}))["observation"]["tools"]
            return [_function(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]
        if len(required := action.get("required", ())) == 1:
            self.field = self.field or required[0]
        fields = {name: about for name, about in action["properties"].items() if name != "metadata"}
        acts = _function("act", action.get("description", "Act."), {**action, "properties": fields})
        return [] if self.field else [acts]

    async def step(self, player: str, text: str) -> dict[str, Any]:
        return await self._take(player, {self.field: text}) if self.field else {"done": True}

    async def call(self, player: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        tool = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return await self._take(player, arguments if name == "act" else tool)

    async def _take(self, player: str, action: dict[str, Any]) -> dict[str, Any]:
        seen = await self._ask("step", action)
        if seen.get("code") == "VALIDATION_ERROR":
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in seen.get("errors", ()))
            return {"observations": {player: f"This is not a valid action: {wrong or seen['message']}"}}
        reward = _whole(seen)["reward"]
        rewards = {} if reward is None else {player: float(reward)}
        return {"observations": {player: self._text(seen)}, "rewards": rewards, "done": seen["done"]}

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self.socket.send_json({"type": kind, "data": data})
        frame = await self.frames.get()
        if frame.type != aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the OpenEnv server ended the session: {frame.data or frame.type.name}")
        answer: dict[str, Any] = json.loads(frame.data)["data"]
        return answer

    def _text(self, seen: dict[str, Any]) -> str:
        fields = {name: value for name, value in seen["observation"].items() if value is not None}
        if "tool_name" in fields:  # of a tool's result, its plain value
            result = fields.get("result", fields.get("error"))
            fields = {"result": result.get("data", result) if isinstance(result, dict) else result}
        elif self.show is not None:
            fields = {self.show: fields.get(self.show, "")}
        only = next(iter(fields.values())) if len(fields) == 1 else fields
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False) if fields else ""

    async def close(self) -> None:
        await self._end_session()
        await self.http.close()

    async def _end_session(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.wait({self.reading})
            self.reading = None
            await self.socket.close()


def _function(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": description, "parameters": parameters}


def _whole(seen: dict[str, Any]) -> dict[str, Any]:
    if "code" in seen:
        raise RuntimeError(f"the OpenEnv environment failed: {seen['code']}: {seen.get('message')}")
    return seen
