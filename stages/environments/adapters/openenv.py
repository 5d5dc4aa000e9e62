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
import os
from typing import Any

import aiohttp

VARIABLE = "PRORL_OPENENV"
WAIT_S = 1.0
"""Seconds between attempts at a server whose sessions are all taken."""
TOOL_ACTIONS = ("CallToolAction", "ListToolsAction", "Action")


class OpenEnv:
    async def open(self, args: dict[str, Any], seed: int | None) -> dict[str, Any]:
        servers = dict(each.split("=", 1) for each in os.environ.get(VARIABLE, "").split())
        name = args.get("server") or (next(iter(servers)) if len(servers) == 1 else "")
        if name not in servers:
            known = ", ".join(servers) or "none"
            raise LookupError(f"no OpenEnv server {name!r}: {VARIABLE} in the environment of RUN names {known}")
        self._show = args.get("show")
        self._http = aiohttp.ClientSession(servers[name].rstrip("/") + "/")
        try:
            async with self._http.get("schema", raise_for_status=True) as answer:
                action = (await answer.json())["action"]
            seen = await self._reset({**args.get("reset", {}), **({} if seed is None else {"seed": seed})})
            tools = await self._tools(action, args.get("field"))
        except BaseException:
            await self.close()
            raise
        return {"observations": {"main": self._text(seen) or "Begin."}, "tools": tools}

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        while True:
            self._socket = await self._http.ws_connect("ws")
            seen = await self._ask("reset", data)
            if seen.get("code") != "CAPACITY_REACHED":
                return self._whole(seen)
            await self._socket.close()
            await asyncio.sleep(WAIT_S)  # the server has no queue; the limit of `open` ends the wait

    async def _tools(self, action: dict[str, Any], field: str | None) -> list[dict[str, Any]]:
        self._field = field or ""
        if action.get("title") in TOOL_ACTIONS:
            listed = self._whole(await self._ask("step", {"type": "list_tools"}))["observation"]["tools"]
            return [
                {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
                for tool in listed
            ]
        required = action.get("required", [])
        if not field and len(required) == 1:
            self._field = required[0]
        fields = {name: about for name, about in action.get("properties", {}).items() if name != "metadata"}
        parameters = {**action, "properties": fields}
        about = {"name": "act", "description": action.get("description", "Act."), "parameters": parameters}
        return [] if self._field else [about]

    async def step(self, player: str, text: str) -> dict[str, Any]:
        if not self._field:
            return {"done": True}
        return self._step(player, await self._ask("step", {self._field: text}))

    async def call(self, player: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return self._step(player, await self._ask("step", arguments if name == "act" else call))

    def _step(self, player: str, seen: dict[str, Any]) -> dict[str, Any]:
        if seen.get("code") == "VALIDATION_ERROR":
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in seen.get("errors", ()))
            return {"observations": {player: f"This is not a valid action: {wrong or seen['message']}"}}
        reward = self._whole(seen).get("reward")
        rewards = {} if reward is None else {player: float(reward)}
        return {"observations": {player: self._text(seen)}, "rewards": rewards, "done": bool(seen.get("done"))}

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_json({"type": kind, "data": data})
        frame = await self._socket.receive()
        if frame.type != aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the OpenEnv server ended the session: {frame.data or frame.type.name}")
        answer: dict[str, Any] = json.loads(frame.data)["data"]
        return answer

    def _whole(self, seen: dict[str, Any]) -> dict[str, Any]:
        if "code" in seen:
            raise RuntimeError(f"the OpenEnv environment failed: {seen['code']}: {seen.get('message')}")
        return seen

    def _text(self, seen: dict[str, Any]) -> str:
        told = {name: value for name, value in seen["observation"].items() if value is not None}
        if self._show is not None:
            told = {self._show: told.get(self._show, "")}
        if "result" in told and "tool_name" in told:
            told = {
                "result": (told["result"] or {}).get("data", told["result"])
                if isinstance(told["result"], dict)
                else told["result"]
            }
        only = next(iter(told.values())) if len(told) == 1 else told
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False) if told else ""

    async def close(self) -> None:
        await self._http.close()
