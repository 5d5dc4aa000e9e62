"""`OpenAiApi`: OpenAI's `/v1/completions`, `/v1/chat/completions` and `/v1/models` for the models of the service.

Evaluation tools use the engines of a running training by these. A reply is generated as a whole, so a stream sends it
as one event at the end, and events before that keep the connection alive. A client that disconnects cancels its jobs.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ..errors import NotAllowed, ProrlError
from ..model_proxy.calls import CallRefused, new_turn_id
from ..model_proxy.dialect import KEEP_ALIVE_S
from ..model_proxy.dialects.chat_completions import ChatCompletions
from ..model_proxy.dialects.common import event, invalid, status_of
from ..model_proxy.event_writer import EventWriter
from ..wire.messages.base import new_id
from ..wire.messages.jobs import Sampling
from .endpoint import ASIDE_TOKENS, Endpoint, decoded_body
from .http_errors import RETRY_S, json_response
from .openai_bodies import (
    CompletionEvents,
    Request,
    chat_answer,
    checked_entries,
    completion_answer,
    error_body,
    read_chat,
    read_completion,
)
from .samples import Asked, refused_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..security.rights import Sender
    from .samples import Samples, Served

_CHAT = ChatCompletions()
_ENCODERS = ThreadPoolExecutor(2, "prorl-encode")
"""Few: each may hold an answer of `ENTRIES_LIMIT` Python objects."""


class OpenAiApi:
    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.endpoints = (
            Endpoint("POST", "/v1/chat/completions", self.chat_completions, raw=True),
            Endpoint("POST", "/v1/completions", self.completions, raw=True),
            Endpoint("GET", "/v1/models", self.list_models, name="models", raw=True),
            Endpoint("GET", "/v1/models/{model:.+}", self.show_model, name="model", raw=True),
        )

    async def chat_completions(self, request: web.Request, sender: Sender) -> web.StreamResponse:
        """Have a model of the service answer a chat, as OpenAI's API does."""
        return await self._answer(request, sender, read_chat)

    async def completions(self, request: web.Request, sender: Sender) -> web.StreamResponse:
        """Have a model of the service continue texts or token ids, as OpenAI's and vLLM's API does."""
        return await self._answer(request, sender, read_completion)

    async def list_models(self, _request: web.Request, _sender: Sender) -> web.Response:
        """List the models that engines of the service serve, in OpenAI's form."""
        try:
            models = await self._samples.models()
        except ProrlError as error:
            return _refusal(refused_by(error))
        return json_response({"object": "list", "data": [_described(name, models[name]) for name in sorted(models)]})

    async def show_model(self, request: web.Request, _sender: Sender) -> web.Response:
        """Show one of these models, or NAME@VERSION while engines serve that version, in OpenAI's form."""
        model = request.match_info["model"]
        try:
            served = await self._samples.served(Asked(model=model, instances=(), sampling=Sampling()))
        except CallRefused as error:
            return _refusal(error)
        except ProrlError as error:
            return _refusal(refused_by(error))
        return json_response(_described(model, served))

    async def _answer(
        self, request: web.Request, sender: Sender, read: Callable[[dict[str, Any]], Request]
    ) -> web.StreamResponse:
        try:
            wanted = read(await decoded_body(request, _object))
            served = await self._samples.check(wanted.asked)
            if wanted.stream:
                return await self._stream(request, sender, wanted)
            return await self._whole(sender, wanted, served)
        except CallRefused as error:
            return _refusal(error)
        except RecursionError:
            return _refusal(invalid("the body is nested too deep"))
        except NotAllowed:
            raise
        except ProrlError as error:
            return _refusal(refused_by(error))

    async def _whole(self, sender: Sender, wanted: Request, served: Served | None) -> web.Response:
        samples = await self._samples.run_all(sender, wanted.asked, served)

        def written() -> bytes:
            if wanted.chat is not None:
                return msgspec.json.encode(chat_answer(wanted, samples, [new_turn_id() for _ in samples]))
            return msgspec.json.encode(completion_answer(wanted, samples, f"cmpl-{new_id()}"))

        many = checked_entries(wanted, samples) >= ASIDE_TOKENS
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(_ENCODERS, written) if many else written()
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: web.Request, sender: Sender, wanted: Request) -> web.StreamResponse:
        writer, turn_id = EventWriter(request, KEEP_ALIVE_S), new_turn_id()
        chat = _CHAT.stream(wanted.chat, wanted.asked.model) if wanted.chat is not None else None
        text = CompletionEvents(wanted, f"cmpl-{new_id()}")
        try:
            if chat is not None:
                writer.write_later(chat.begin(turn_id, 0))
            async with writer.kept_alive((chat or text).waiting):
                (sample,) = await self._samples.run_all(sender, wanted.asked)
            checked_entries(wanted, (sample,))
            await writer.finish(chat.end(sample.as_turn(turn_id)) if chat is not None else text.end(sample))
        except (CallRefused, ProrlError) as error:
            if not writer.begun:
                raise
            refused = error if isinstance(error, CallRefused) else refused_by(error)
            await writer.finish(event(error_body(refused)))
        return writer.response


def _described(name: str, served: Served) -> dict[str, Any]:
    length = served.context_tokens or None
    return {"id": name, "object": "model", "created": 0, "owned_by": "prorl", "max_model_len": length}


def _object(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not a JSON object: {error}") from None


def _refusal(error: CallRefused) -> web.Response:
    status = status_of(error, 400)
    retry = {"Retry-After": str(round(RETRY_S))} if status in (429, 503) else None
    return json_response(error_body(error), status, retry)
