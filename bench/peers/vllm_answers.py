"""An HTTP server that answers chat completions at once, in vLLM's form: `python vllm_answers.py PORT REPLY`.

REPLY is JSON: the reply's `text`, the `command` of its call, and its `tokens`. The answer has ids for a prompt of the
header `x-prompt-tokens`'s length, and an id and a log-prob for each token of the reply, as vLLM returns them with
`return_token_ids` and `logprobs`. A stream has as few events as possible; vLLM sends one for each step of its engine.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import uvloop
from aiohttp import web

MOST_TOKENS = 100_000
BODY_LIMIT_BYTES = 2**26


class Answers:
    """All answers, made of parts that are JSON beforehand."""

    def __init__(self, text: str, command: str, tokens: int) -> None:
        ids = [str(10_007 + number * 7_919 % 90_000) for number in range(MOST_TOKENS)]
        self._ids = ",".join(ids)  # five digits each
        self._text = text
        self._arguments = json.dumps({"command": command})
        self._token_ids = [int(one) for one in ids[:tokens]]
        self._logprobs = {
            "content": [
                {"token": "word", "logprob": -0.1234567890123 - number, "bytes": [119, 111, 114], "top_logprobs": []}
                for number in range(tokens)
            ]
        }
        self._number = 0

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request."""
        body = await request.read()
        prompt_tokens = int(request.headers["x-prompt-tokens"])
        self._number += 1
        call = {"id": f"call_{self._number}", "type": "function"}
        call["function"] = {"name": "bash", "arguments": self._arguments}
        streamed = b'"stream": true' in body or b'"stream":true' in body
        if streamed:
            content = self._events(call, prompt_tokens)
            return web.Response(body=content, content_type="text/event-stream")
        message = {"role": "assistant", "content": self._text, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "stop_reason": None}
        choice |= {"logprobs": self._logprobs, "token_ids": self._token_ids}
        whole = self._head("chat.completion", [choice]) | {"usage": self._usage(prompt_tokens)}
        return web.Response(body=self._with_prompt(whole, prompt_tokens), content_type="application/json")

    def _events(self, call: dict[str, Any], prompt_tokens: int) -> bytes:
        tokens = {"logprobs": self._logprobs, "token_ids": self._token_ids}
        deltas = [
            ({"role": "assistant", "content": ""}, None, {"logprobs": None}),
            ({"content": self._text}, None, tokens),
            ({"tool_calls": [{"index": 0, **call}]}, None, {"logprobs": None}),
            ({}, "tool_calls", {"logprobs": None}),
        ]
        chunks = [
            self._head("chat.completion.chunk", [{"index": 0, "delta": delta, "finish_reason": reason, **more}])
            for delta, reason, more in deltas
        ]
        chunks.append(self._head("chat.completion.chunk", []) | {"usage": self._usage(prompt_tokens)})
        first, *others = chunks
        events = [self._with_prompt(first, prompt_tokens), *(json.dumps(chunk).encode() for chunk in others), b"[DONE]"]
        return b"".join(b"data: %b\n\n" % event for event in events)

    def _head(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        named = {"id": f"chatcmpl-{self._number:032x}", "object": kind, "created": int(time.time())}
        return {**named, "model": "policy", "choices": choices}

    def _usage(self, prompt_tokens: int) -> dict[str, int]:
        said = len(self._token_ids)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": said, "total_tokens": prompt_tokens + said}

    def _with_prompt(self, data: dict[str, Any], prompt_tokens: int) -> bytes:
        ids = self._ids[: 6 * prompt_tokens - 1]
        return f'{json.dumps(data)[:-1]}, "prompt_token_ids": [{ids}]}}'.encode()


async def well(_: web.Request) -> web.Response:
    """Answer who asks whether anybody is here."""
    return web.Response()


def main() -> None:
    port, reply = sys.argv[1:]
    app = web.Application(client_max_size=BODY_LIMIT_BYTES)
    app.router.add_post("/v1/chat/completions", Answers(**json.loads(reply)).answer)
    app.router.add_get("/health", well)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, access_log=None, loop=uvloop.new_event_loop())


if __name__ == "__main__":
    main()
