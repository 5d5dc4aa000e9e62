"""`TinkerApi`: the routes with which Tinker's sampling client gets replies of the service's models.

    POST /api/v1/create_session, create_sampling_session, asample, retrieve_future, session_heartbeat, telemetry

A request is identified by its sampling session and `seq_id`: repeating it returns the same replies. Sessions are no
state: their ids name the model. Requests are, and die with the gateway: asking for one that is unknown gets 410, upon
which the client samples anew. While the service is full a request waits, and its client is told so. A request that
waits and is not asked for during `ABANDONED_S` is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp import web

from ..errors import Busy, ProrlError
from ..model_proxy.calls import CallRefused, Problem
from ..model_proxy.dialects.common import invalid
from ..wire.messages.base import JobIdentifier, KeyRole, new_id
from .connection import check_may
from .endpoint import Endpoint
from .http_errors import json_response
from .samples import CHOICES_LIMIT, LONGEST, checked_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..security.rights import Sender
    from .endpoint import Call
    from .samples import Sample, Samples

OPEN_LIMIT = 4096
"""Most requests without a reply; further ones are answered 429, and the client waits."""
ENDED_LIMIT = 1024
"""Requests whose replies are kept, since a lost answer is asked for again."""
LOOK_S = 30.0
"""How long a question for a reply is held; the client waits 45 s."""
ABANDONED_S = 120.0
FULL_S = 1.0
"""Pause before a request that the service had no room for is tried again."""
SCORING = "the log-probs of prompts, and of tokens that were not sampled, are not available"
SCHEME = "tinker://"
_VARINT, _BYTES = 0, 2
"""Wire types of protobuf."""


class _Body(msgspec.Struct, frozen=True):
    """Base of the bodies; fields that are not listed are ignored."""


class NewSamplingSession(_Body, frozen=True):
    """Choose a model: by the service's name of it, by the name that its engine reports, or as `tinker://…/NAME`."""

    session_id: JobIdentifier
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(_Body, frozen=True):
    """A part of a prompt."""

    tokens: list[int] = []
    type: str = "encoded_text"


class Prompt(_Body, frozen=True):
    """Token ids in parts."""

    chunks: tuple[Chunk, ...]


class SamplingParams(_Body, frozen=True):
    """As in Tinker."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    """None: what ends a turn of the model ends the reply. `[]`: nothing does."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class NewSample(_Body, frozen=True):
    """Ask for replies to one prompt."""

    sampling_session_id: str
    seq_id: int
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


class Promise(_Body, frozen=True):
    """A request under way."""

    request_id: str
    sample_sequence_ids: tuple[str, ...] = ()


@dataclass(slots=True)
class _Request:
    owner: str
    """The name of the token that made it."""
    promise: Promise
    task: asyncio.Task[list[Sample]]
    asked_at: float = field(default_factory=time.monotonic)
    full: str = ""
    """Why the service has no room for it now; empty: it has."""


class TinkerApi:
    """`close` it.

    Args:
        samples: what runs the requests.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        post = partial(Endpoint, "POST")
        self.endpoints = (
            post("/api/v1/client/config", self.client_config, name="tinker_config"),
            post("/api/v1/client/dynamic_config", self.client_config, name="tinker_dynamic_config"),
            post("/api/v1/create_session", self.create_session, name="tinker_create_session"),
            post(
                "/api/v1/create_sampling_session",
                self.create_sampling_session,
                takes=NewSamplingSession,
                name="tinker_create_sampling_session",
            ),
            Endpoint("GET", "/api/v1/samplers/{sampler_id}", self.sampler, name="tinker_sampler"),
            post("/api/v1/asample", self.asample, takes=NewSample, name="tinker_asample"),
            post("/api/v1/retrieve_future", self.retrieve_future, takes=Promise, name="tinker_retrieve_future"),
            post("/api/v1/session_heartbeat", self.session_heartbeat, name="tinker_session_heartbeat"),
            post("/api/v1/telemetry", self.telemetry, name="tinker_telemetry"),
            Endpoint("GET", "/api/v1/get_server_capabilities", self.capabilities, name="tinker_capabilities"),
            Endpoint("GET", "/api/v1/healthz", self.tinker_health, needs="nothing"),
        )

    async def client_config(self, _call: Call) -> dict[str, Any]:
        """Return the settings of Tinker's client that differ from its own: none."""
        return {}

    async def create_session(self, call: Call) -> dict[str, Any]:
        """Begin a session of Tinker's client."""
        check_may(call.sender, KeyRole.TRAINER)
        return {"type": "create_session", "session_id": new_id()}

    async def create_sampling_session(self, call: Call) -> object:
        """Choose the model of a sampling session."""
        check_may(call.sender, KeyRole.TRAINER)
        asked: NewSamplingSession = call.body
        try:
            name = await self._model(asked)
        except CallRefused as error:
            return _refused(404 if error.problem == Problem.NOT_FOUND else 400, error.message)
        sampling_session_id = f"{asked.session_id}:{asked.sampling_session_seq_id}:{name}"
        return {"type": "create_sampling_session", "sampling_session_id": sampling_session_id}

    async def sampler(self, call: Call) -> object:
        """Return the model of a sampling session; its base model is what its engine calls it."""
        sampler_id = call.path["sampler_id"]
        name = _model_in(sampler_id)
        served = (await self._samples.models()).get(name)
        if served is None:
            return _refused(404, (await self._samples.unknown(name)).message)
        return {"sampler_id": sampler_id, "base_model": served.engine or name, "model_path": f"{SCHEME}prorl/{name}"}

    async def asample(self, call: Call) -> object:
        """Ask for replies; `retrieve_future` returns them."""
        check_may(call.sender, KeyRole.TRAINER)
        asked: NewSample = call.body
        named = f"{call.sender.name}\n{asked.sampling_session_id}\n{asked.seq_id}"
        request_id = hashlib.sha256(named.encode(errors="replace")).hexdigest()[:32]
        known = self._requests.get(request_id)
        if known is not None:
            return known.promise
        try:
            sampling, instance = _read(asked)
            await self._samples.check_model(_model_in(asked.sampling_session_id))
        except CallRefused as error:
            return _refused(404 if error.problem == Problem.NOT_FOUND else 400, error.message)
        self._make_room()
        promise = Promise(request_id, tuple(f"{request_id}-{number}" for number in range(asked.num_samples)))
        work = self._sampled(call.sender, request_id, _model_in(asked.sampling_session_id), instance, sampling, promise)
        self._requests[request_id] = _Request(call.sender.name, promise, asyncio.create_task(work))
        return promise

    async def retrieve_future(self, call: Call) -> object:
        """Return the replies to a request, once there are all, as protobuf."""
        request_id = call.body.request_id
        request = self._requests.get(request_id)
        if request is None or request.owner != call.sender.name:
            return _refused(410, f"no request {request_id:.64} is known here; sample again")
        request.asked_at = time.monotonic()
        await asyncio.wait({request.task}, timeout=LOOK_S)
        request.asked_at = time.monotonic()
        if not request.task.done():
            state = {"queue_state": "paused_capacity", "queue_state_reason": request.full}
            return {"type": "try_again", "request_id": request_id, **(state if request.full else ACTIVE)}
        if request.task.cancelled():
            return _refused(410, "the gateway is stopping; sample again")
        try:
            samples = request.task.result()
        except CallRefused as error:
            mine = error.problem in (Problem.INVALID, Problem.CONTEXT_LENGTH, Problem.TOO_LARGE, Problem.NOT_FOUND)
            return {"error": error.message, "category": "user" if mine else "server"}
        except ProrlError as error:
            return {"error": error.message, "category": "server"}
        return web.Response(body=_sample_response(samples), content_type="application/x-protobuf")

    async def session_heartbeat(self, _call: Call) -> dict[str, Any]:
        """Answer the heartbeat of a session; sessions do not expire."""
        return {"type": "session_heartbeat"}

    async def telemetry(self, _call: Call) -> dict[str, Any]:
        """Take events of Tinker's client, which are dropped."""
        return {"status": "accepted"}

    async def capabilities(self, _call: Call) -> dict[str, Any]:
        """List the models, for Tinker's client."""
        models = await self._samples.models()
        return {
            "supported_models": [
                {"model_name": name, "max_context_length": one.context_tokens or None, "sampleable": True}
                | {"trainable": False}
                for name, one in sorted(models.items())
            ]
        }

    async def tinker_health(self, _call: Call) -> dict[str, Any]:
        """Answer Tinker's client that the gateway is up."""
        return {"status": "ok"}

    async def close(self) -> None:
        """Cancel the requests that have no reply."""
        tasks = [request.task for request in self._requests.values() if not request.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _model(self, asked: NewSamplingSession) -> str:
        named = asked.model_path or asked.base_model or ""
        if asked.model_path is not None:
            if not asked.model_path.startswith(SCHEME):
                raise invalid(f"model_path must begin with {SCHEME}, such as {SCHEME}prorl/policy, not {named!r:.200}")
            named = asked.model_path.rpartition("/")[2]
        if "@" in named:
            raise invalid(f"{named!r:.200} names a version; a model's current weights are all that can be sampled from")
        models = await self._samples.models()
        if named in models:
            return named
        by_engine = [name for name, one in models.items() if one.engine == named]
        if not by_engine:
            raise await self._samples.unknown(named)
        return by_engine[0]

    async def _sampled(
        self, sender: Sender, request_id: str, model: str, instance: dict[str, Any], sampling: Any, promise: Promise
    ) -> list[Sample]:
        count = len(promise.sample_sequence_ids)
        while True:
            try:
                return await self._samples.run_all(sender, model, (instance,), count, sampling)
            except CallRefused as error:
                request = self._requests[request_id]
                if error.problem != Problem.BUSY or time.monotonic() - request.asked_at > ABANDONED_S:
                    raise
                request.full = error.message
            await asyncio.sleep(FULL_S)

    def _make_room(self) -> None:
        """Drop the oldest replies; raise `Busy` if there are too many requests without one."""
        ended = [request_id for request_id, request in self._requests.items() if request.task.done()]
        if len(self._requests) - len(ended) >= OPEN_LIMIT:
            raise Busy(f"{OPEN_LIMIT} requests of Tinker's API are open at this gateway", retry_after_s=1.0)
        for request_id in ended[: max(0, len(ended) - ENDED_LIMIT)]:
            del self._requests[request_id]


ACTIVE: dict[str, Literal["active"]] = {"queue_state": "active"}


def _model_in(sampling_session_id: str) -> str:
    return sampling_session_id.rpartition(":")[2]


def _read(asked: NewSample) -> tuple[Any, dict[str, Any]]:
    """Return the sampling of a request, and the fields of its `SampleInstance`.

    Raises:
        CallRefused: it is wrong, or asks for scores.
    """
    scores = ("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs")
    for name in (*scores, "prompt_alt_tokens_k"):
        if getattr(asked, name):
            raise invalid(f"{name} is not supported: {SCORING}")
    if not 1 <= asked.num_samples <= CHOICES_LIMIT:
        raise invalid(f"num_samples must be 1 to {CHOICES_LIMIT}, not {asked.num_samples}")
    for chunk in asked.prompt.chunks:
        if chunk.type != "encoded_text":
            raise invalid(f"the prompt has a chunk of type {chunk.type!r:.50}; only encoded_text is supported")
    tokens = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
    if not tokens:
        raise invalid("the prompt has no tokens")
    params = asked.sampling_params
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    sampling = checked_sampling(
        max_tokens=params.max_tokens or LONGEST,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        seed=params.seed,
        stop=[one for one in stop if isinstance(one, str)],
        stop_token_ids=[one for one in stop if isinstance(one, int)],
    )
    return sampling, {"token_ids": tokens, "turn_ends": params.stop is None}


def _refused(status: int, message: str) -> web.Response:
    return json_response({"error": message, "detail": message}, status)


def _sample_response(samples: Sequence[Sample]) -> bytes:
    """Return replies to one prompt as Tinker's `SampleResponse`, in protobuf's wire format.

    SampleResponse   1 sequences: SampledSequence, repeated    4 prompt_cache_hit_tokens: int32
    SampledSequence  1 stop_reason: 0 stop, 1 length    2 tokens: int32, as bytes    3 logprobs: float32, as bytes

    Two messages of five fields need no library and no generated classes, whose versions must fit each other.
    """
    sequences = (_field(1, _sequence(sample)) for sample in samples)
    return b"".join([*sequences, _number(4, max(sample.reply.cached_tokens for sample in samples))])


def _sequence(sample: Sample) -> bytes:
    return b"".join(
        [
            _number(1, int(sample.reply.finish_reason == "length")),
            _field(2, sample.token_ids.astype("<i4").tobytes()),
            _field(3, sample.logprobs.astype("<f4").tobytes()),
        ]
    )


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
