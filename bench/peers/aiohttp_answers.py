"""A bare aiohttp server: `python aiohttp_answers.py PORT REPLY`. It answers any body with the same chat completion.

REPLY is JSON: the reply's `text` and the `command` of its call. The completion has the fields of the model proxy's own.
"""

from __future__ import annotations

import json
import sys

import uvloop
from aiohttp import web

BODY_LIMIT_BYTES = 2**26


def completion(text: str, command: str) -> bytes:
    """Return the whole answer."""
    call = {"id": "call_" + 24 * "0", "type": "function"}
    call_of = {**call, "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
    message = {"role": "assistant", "content": text, "tool_calls": [call_of]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    usage = {"prompt_tokens": 10_000, "completion_tokens": 100, "total_tokens": 10_100}
    head = {"id": f"chatcmpl-{32 * '0'}", "object": "chat.completion", "created": 1_700_000_000, "model": "policy"}
    return json.dumps({**head, "choices": [choice], "usage": usage}).encode()


def main() -> None:
    port, reply = sys.argv[1:]
    body = completion(**json.loads(reply))

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def well(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=BODY_LIMIT_BYTES)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/health", well)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, access_log=None, loop=uvloop.new_event_loop())


if __name__ == "__main__":
    main()
