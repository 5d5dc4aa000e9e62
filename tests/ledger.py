"""A proxy before an inference server, which keeps a ledger of the tokens that passed: what was asked and answered."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, NamedTuple, Self

from aiohttp import ClientSession, ClientTimeout, web

GENERATE = "/inference/v1/generate"
LIMIT_S = 60.0


class Entry(NamedTuple):
    """One generation, as the server sent it."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[str, int, int], ...]
    """(version, start, end) per span, in the server's words."""


class Ledger:
    """Runs in a thread of its own for as long as its context.

    Args:
        server: the URL of a vLLM server.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.entries: list[Entry] = []
        self.url = ""
        self._ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)
        self.loop.close()

    async def _run(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        async with ClientSession(timeout=ClientTimeout(total=None)) as self._session:
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def ask(self, method: str, path: str, body: bytes) -> web.Response:
        """Ask the server."""
        headers = {"Content-Type": "application/json"}
        async with self._session.request(method, self._server + path, data=body, headers=headers) as answer:
            content = await answer.read()
        return web.Response(body=content, status=answer.status, content_type=answer.content_type)

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        answer = await self.ask(request.method, request.path_qs, body)
        if request.path == GENERATE and answer.status == 200:
            assert isinstance(answer.body, bytes)
            self._note(json.loads(body), json.loads(answer.body))
        return answer

    def _note(self, asked: Any, answered: Any) -> None:
        (choice,) = answered["choices"]
        self.entries.append(
            Entry(
                tuple(asked["token_ids"]),
                tuple(choice["token_ids"]),
                tuple(one["logprob"] for one in choice["logprobs"]["content"]),
                tuple((span["version"], span["start"], span["end"]) for span in choice["weight_versions"]),
            )
        )
