"""HTTP servers on loopback that behave as vLLM, SGLang and ProRL's backends do, or as badly as a test wants."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

WAIT_S = 20.0


class FakeServer:
    """Answers each path by a handler, and notes what it was asked."""

    def __init__(self, **handlers: Callable[[Any], Awaitable[web.Response] | web.Response]) -> None:
        self.handlers: dict[str, Any] = {"/health": lambda _: web.Response()}
        self.requests: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        """The Authorization header of each request."""
        self.cancelled = asyncio.Event()
        """Some client left before its answer."""
        self._changed = asyncio.Event()
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = ""

    async def start(self, port: int = 0) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, backlog=4096)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        content = json.loads(body) if body else None
        self.requests.append((request.path_qs, content))
        self.keys.append(request.headers.get("Authorization"))
        self._changed.set()
        handler = self.handlers.get(request.path)
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            answer = handler(content)
            return await answer if asyncio.iscoroutine(answer) else answer
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def asked(self, path: str) -> list[Any]:
        return [content for asked, content in self.requests if asked.partition("?")[0] == path]


class Speech:
    """How one dialect's server answers a generation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = {
            "vllm": "/inference/v1/generate",
            "completions": "/v1/completions",
            "sglang": "/generate",
            "prorl": "/generate",
        }[name]

    def prompt(self, body: Any) -> list[int]:
        return body[
            {"vllm": "token_ids", "completions": "prompt", "sglang": "input_ids", "prorl": "prompt_ids"}[self.name]
        ]

    def max_tokens(self, body: Any) -> int:
        parameters = body if self.name in ("completions", "prorl") else body["sampling_params"]
        return parameters["max_new_tokens" if self.name == "sglang" else "max_tokens"]

    def answer(
        self, ids: list[int], logprobs: list[float | None], reason: str = "length", version: str = "default"
    ) -> Any:
        match self.name:
            case "vllm":
                content = [{"token_id": i, "logprob": p, "rank": 1} for i, p in zip(ids, logprobs, strict=False)]
                content += [{"token_id": 0, "logprob": p} for p in logprobs[len(ids) :]]
                spans = [{"version": version, "start": 0, "end": len(ids)}] if ids else []
                choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}
                return {"choices": [{**choice, "weight_versions": spans}], "usage": {}}
            case "completions":
                choice = {"text": "x", "token_ids": ids, "finish_reason": reason}
                usage = {"prompt_tokens_details": {"cached_tokens": 2}}
                return {"choices": [{**choice, "logprobs": {"token_logprobs": logprobs}}], "usage": usage}
            case "sglang":
                meta = {"finish_reason": {"type": reason, "length": 4}, "cached_tokens": 2, "weight_version": version}
                entries = [[p, i, None] for i, p in zip(ids, logprobs, strict=False)]
                return {"text": "x", "output_ids": ids, "meta_info": {**meta, "output_token_logprobs": entries}}
            case _:
                return {"response_ids": ids, "logprobs": logprobs}

    def text_only(self) -> Any:
        match self.name:
            case "sglang":
                return {"text": "hello", "meta_info": {"finish_reason": {"type": "stop"}}}
            case "prorl":
                return {"text": ["hello"]}
            case _:
                return {"choices": [{"text": "hello", "logprobs": None, "finish_reason": "stop"}]}

    def good(self, body: Any) -> web.Response:
        """Continue 1, 2, 3 with 4, 5, …, as a server does that computes log-probs before top-k."""
        prompt, count = self.prompt(body), self.max_tokens(body)
        ids = [(prompt[-1] + 1 + n) % 100 for n in range(count)]
        return web.json_response(self.answer(ids, [-0.5] * count))


SPEECHES = ("vllm", "completions", "sglang", "prorl")


@pytest.fixture(params=SPEECHES)
def speech(request: pytest.FixtureRequest) -> Speech:
    return Speech(request.param)


@pytest.fixture
def speeches() -> dict[str, Speech]:
    return {name: Speech(name) for name in SPEECHES}


@pytest.fixture
def serving() -> Callable[..., Any]:
    """An asynchronous context manager: a `FakeServer` that runs."""

    @asynccontextmanager
    async def running(speech: Speech | None = None) -> AsyncIterator[FakeServer]:
        server = FakeServer()
        if speech is not None:
            server.handlers[speech.path] = speech.good
        await server.start()
        try:
            yield server
        finally:
            await server.stop()

    return running


@pytest.fixture
def scripted() -> Callable[..., Any]:
    """An asynchronous context manager: the URL of a server that writes these bytes after a request, and closes."""

    @asynccontextmanager
    async def running(*answers: bytes) -> AsyncIterator[tuple[str, list[int]]]:
        connections: list[int] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answer = answers[min(len(connections), len(answers) - 1)]
            connections.append(1)
            if answer:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            yield f"http://{host}:{port}", connections

    return running


@pytest.fixture
def weights(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a small checkpoint in a folder of the given name."""

    def make(name: str, size: int = 3) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file({"layer": np.zeros(size, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"vocab_size": 100}')
        return folder

    return make
