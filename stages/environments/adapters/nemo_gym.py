"""NeMo Gym: resources servers over HTTP, one session per rollout. Runs in the service's own interpreter.

PRORL_NEMO_GYM names the servers: `NAME=URL NAME=URL`. An instance's args are `row`, a row of a server's JSONL, and
`server`, a name among these; it may be left out if there is one, or if the row's `agent_ref` has such a name.

Servers with `/seed_session` and `/verify` offer the row's functions as tools, and the first turn without a call ends
the rollout. Servers of the Gymnasium form (`/reset`, `/step`) see each turn.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import aiohttp

from prorl_zmq.stages.environments.named_servers import named_server
from prorl_zmq.tasks.nemo_gym_rows import PARAMS, offered_tools, opening_messages

VARIABLE = "PRORL_NEMO_GYM"
NOT_FOUND, ERRORS = 404, 300
PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class NemoGym:
    limit_s = 600.0
    """A server's judge may be a model."""

    async def open(self, args: dict[str, Any], seed: int | None) -> dict[str, Any]:
        self.row = {**({} if seed is None else {"seed": seed}), **args["row"]}
        self.params, self.output = self.row[PARAMS], list[dict[str, Any]]()
        messages, agent = opening_messages(self.params), (self.row.get("agent_ref") or {}).get("name", "")
        url = named_server(VARIABLE, args.get("server", ""), hint=agent)
        jar = aiohttp.CookieJar(unsafe=True)  # also for hosts that are IP addresses
        self.http = aiohttp.ClientSession(url, cookie_jar=jar)
        try:
            status, begun = await self._post("seed_session", self.row)
            self.is_gymnasium = status == NOT_FOUND
            seen = await self._ask("reset") if self.is_gymnasium else _parsed(status, begun)
        except BaseException:
            await self.http.close()
            raise
        if observation := seen.get("observation"):
            messages.append({"role": "user", "content": observation})
        return {"observations": {"main": messages}, "tools": offered_tools(self.params)}

    async def step(self, player: str, text: str) -> dict[str, Any]:
        return await self._take(player, _message(text, len(self.output)))

    async def call(self, player: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call_id = f"call_{len(self.output)}"
        call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)}
        if self.is_gymnasium:
            return await self._take(player, call)
        _, text = await self._post(name, arguments)  # the text of an error is for the policy, too
        self.output += [call, {"type": "function_call_output", "call_id": call_id, "output": text}]
        return {"observations": {player: text}}

    async def _take(self, player: str, item: dict[str, Any]) -> dict[str, Any]:
        self.output.append(item)
        if not self.is_gymnasium:
            return {"done": True}
        seen = await self._ask("step", [item])
        info, reward = seen.get("info") or {}, {player: seen["reward"]}
        texts = [*(result["output"] for result in info.get("tool_outputs", ())), seen.get("observation")]
        ends = {"done": seen["terminated"] or seen["truncated"], "truncated": seen["truncated"]}
        return {"observations": {player: "\n".join(filter(None, texts))}, "rewards": reward, "info": info, **ends}

    async def close(self) -> dict[str, Any] | None:
        async with self.http:
            if self.is_gymnasium:
                return None
            judged = await self._ask("verify", self.output or [_message("", 0)])
        if judged.get("mask_sample"):
            return {"mask": judged.get("failure_reason") or judged.get("failure_kind") or "the server masks the sample"}
        own = {key: value for key, value in judged.items() if key not in {*self.row, "reward", "response"}}
        return {"rewards": {"main": judged["reward"]}, "info": {**own, **judged.get("reward_components", {})}}

    async def _ask(self, path: str, output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Post the row, with a response of such an output."""
        own = {"tools": self.params.get("tools") or [], "tool_choice": self.params.get("tool_choice") or "auto"}
        kind = {"object": "response", "model": "policy", "parallel_tool_calls": True}
        response = {"id": f"resp_{id(self):x}", "created_at": time.time(), "output": output, **kind, **own}
        return _parsed(*await self._post(path, {**self.row, **({"response": response} if output else {})}))

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if not PATH.fullmatch(path):  # an address in a row's tool would be called
            raise ValueError(f"{path!r:.200} is not a name of a tool")
        async with self.http.post(path, json=body, allow_redirects=False) as answer:
            return answer.status, await answer.text()


def _message(text: str, number: int) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "status": "completed", "id": f"msg_{number}", "content": content}


def _parsed(status: int, text: str) -> dict[str, Any]:
    if status >= ERRORS:
        raise RuntimeError(f"the NeMo Gym server answered with {status}: {text[:500]}")
    answer: dict[str, Any] = json.loads(text)
    return answer
