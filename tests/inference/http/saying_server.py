"""An HTTP server with vLLM's token API and a tokenizer of its own, whose model only ever says one text."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from aiohttp import web
from chat_families import FAMILIES, make_tokenizer

from .conftest import FakeServer, Speech

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def server_that_says(text: str, model: Path) -> Iterator[FakeServer]:
    """Serve from a thread; `model` is the folder in which it puts the tokenizer."""
    tokenizer, speech, server = make_tokenizer(FAMILIES["chatml"]), Speech("vllm"), FakeServer()
    tokenizer.save_pretrained(model)
    said = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)

    def generate(body: Any) -> web.Response:
        ids = said[: speech.max_tokens(body)]
        return web.json_response(speech.answer(ids, [-0.5] * len(ids), "stop" if ids == said else "length"))

    card = {"id": "sayer", "root": str(model), "max_model_len": 131_072}
    server.handlers |= {speech.path: generate, "/v1/models": lambda _: web.json_response({"data": [card]})}
    with _served(server):
        yield server


@contextmanager
def plain_server() -> Iterator[str]:
    """Serve nothing of a model; yield the URL."""
    server = FakeServer()
    with _served(server):
        yield server.url


@contextmanager
def _served(server: FakeServer) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
