"""NeMo Gym: resources servers over HTTP, one session per rollout. Runs in the service's own interpreter.

PRORL_NEMO_GYM names the servers: `NAME=URL NAME=URL`. An instance's args:

- `row`: a row of the server's JSONL, as it is.
- `server`: a name among these; may be left out if there is one, or if the row's `agent_ref` has such a name.

Servers with `/seed_session` and `/verify` offer the row's functions as tools, and the first turn without a call ends
the rollout. Servers of the Gymnasium form (`/reset`, `/step`) see each turn.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import aiohttp

VARIABLE = "PRORL_NEMO_GYM"
NOT_FOUND, ERRORS = 404, 400


class NemoGym:
    async def open(self, args: dict[str, Any], seed: int | None) -> dict[str, Any]:
        self.row = {**({} if seed is None else {"seed": seed}), **args["row"]}
        self.params = self.row["responses_create_params"]
        servers = dict(each.split("=", 1) for each in os.environ.get(VARIABLE, "").split())
        named = args.get("server") or (self.row.get("agent_ref") or {}).get("name", "")
        name = next(iter(servers), "") if len(servers) == 1 and not args.get("server") else named
        if name not in servers:
            known = ", ".join(servers) or "none"
            raise LookupError(f"no NeMo Gym server {name!r}: {VARIABLE} in the environment of RUN names {known}")
        self.output: list[dict[str, Any]] = []
        # Hosts that are IP addresses get their cookie back too.
        jar = aiohttp.CookieJar(unsafe=True)
        self.http = aiohttp.ClientSession(servers[name].rstrip("/") + "/", cookie_jar=jar)
        try:
            status, text = await self._post("seed_session", self.row)
            self.is_gymnasium = status == NOT_FOUND
            begun = self._answer(
                "reset" if self.is_gymnasium else "seed_session",
                *(await self._post("reset", self.row) if self.is_gymnasium else (status, text)),
            )
        except BaseException:
            await self.http.close()
            raise
        messages = _messages(self.params)
        if begun.get("observation"):
            messages.append({"role": "user", "content": begun["observation"]})
        tools = [
            {key: tool.get(key) for key in ("name", "description", "parameters")}
            for tool in self.params.get("tools") or ()
        ]
        return {"observations": {"main": messages}, "tools": tools}

    async def step(self, player: str, text: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        said = {"type": "message", "role": "assistant", "status": "completed", "content": content}
        return await self._act(player, {**said, "id": f"msg_{len(self.output)}"})

    async def call(self, player: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call_id = f"call_{len(self.output)}"
        call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)}
        if self.is_gymnasium:
            return await self._act(player, call)
        _, text = await self._post(name, arguments)  # an error's text is for the policy too
        self.output += [call, {"type": "function_call_output", "call_id": call_id, "output": text}]
        return {"observations": {player: text}}

    async def _act(self, player: str, item: dict[str, Any]) -> dict[str, Any]:
        self.output.append(item)
        if not self.is_gymnasium:
            return {"done": True}
        seen = self._answer("step", *await self._post("step", {**self.row, "response": self._response([item])}))
        results = [result["output"] for result in seen.get("info", {}).get("tool_outputs", ())]
        text = "\n".join([*results, *filter(None, [seen.get("observation")])])
        return {
            "observations": {player: text},
            "rewards": {player: seen["reward"]},
            "done": seen["terminated"] or seen["truncated"],
            "truncated": seen["truncated"],
            "info": seen.get("info", {}),
        }

    async def close(self) -> dict[str, Any] | None:
        try:
            if self.is_gymnasium:
                return None
            judged = self._answer(
                "verify", *await self._post("verify", {**self.row, "response": self._response(self.output)})
            )
        finally:
            await self.http.close()
        if judged.get("mask_sample"):
            return {"mask": judged.get("failure_reason") or judged.get("failure_kind") or "the server masks the sample"}
        own = {key: value for key, value in judged.items() if key not in {*self.row, "reward", "response"}}
        return {"rewards": {"main": judged["reward"]}, "info": {**own, **judged.get("reward_components", {})}}

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        async with self.http.post(path, json=body) as answer:
            return answer.status, await answer.text()

    def _answer(self, path: str, status: int, text: str) -> dict[str, Any]:
        if status >= ERRORS:
            raise RuntimeError(f"the NeMo Gym server answered /{path} with {status}: {text[:500]}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        parts = {key: self.params.get(key) or value for key, value in (("tools", []), ("tool_choice", "auto"))}
        kind = {"object": "response", "model": "policy", "parallel_tool_calls": True}
        return {"id": f"resp_{id(self):x}", "created_at": time.time(), "output": output, **kind, **parts}


def _messages(params: dict[str, Any]) -> list[dict[str, str]]:
    given = params["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if params.get("instructions"):
        items = [{"role": "system", "content": params["instructions"]}, *items]
    return [
        {"role": "system" if item["role"] == "developer" else item["role"], "content": _text(item["content"])}
        for item in items
    ]


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
