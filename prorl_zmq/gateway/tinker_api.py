"""`TinkerApi`: the routes with which Tinker's sampling client gets replies of the service's models.

    POST /api/v1/create_session, create_sampling_session, asample, retrieve_future, session_heartbeat, telemetry

A request is identified by its sampling session and `seq_id`: repeating it returns the same replies. Sessions are no
state: their ids name the model. Requests are kept in memory: asking for an unknown one returns 410, and the client
samples again. While the service is full a request waits, and `retrieve_future` reports it. A request that is not asked
for during `ABANDONED_S` before its end is dropped, and its jobs are cancelled; after its end or its last retrieval its
reply is kept for `FETCHED_S`, unless the limits of all replies, or of its token's, need the room.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web

from ..errors import Busy, ProrlError
from ..model_proxy.calls import CallRefused, Problem
from ..model_proxy.dialects.common import invalid
from ..wire.messages.base import POLICY, JobIdentifier, KeyRole, new_id
from ..wire.messages.jobs import Sampling
from .connection import check_may
from .endpoint import Endpoint
from .http_errors import json_response
from .samples import LONGEST, Asked, unknown_model
from .tinker_bodies import Body, NewSample, TargetLogprobs, Wanted, read_sample, sample_response

if TYPE_CHECKING:
    from ..security.rights import Sender
    from .endpoint import Call
    from .samples import Samples

OPEN_LIMIT = 4096
"""Most requests without a reply; further ones are answered 429, and the client waits."""
OWN_OPEN_LIMIT = 1024
"""Most of one token."""
LOAD_LIMIT = 2**26
"""Most tokens of prompts of one token's open requests, counted for each reply, if there are several requests."""
REPLY_LOAD = 4096
"""What a reply counts at least."""
KEPT_LIMIT = 1024
"""Replies of one token that are kept, since a lost answer is asked for again."""
KEPT_BYTES = 256 * 2**20
"""Of all of them; the latest is kept in any case."""
ALL_KEPT_BYTES = 2**30
"""Of the replies of all tokens, besides the latest one."""
FETCHED_S = 300.0
"""How long a reply is kept after its end, or after it was fetched."""
LOOK_S = 30.0
"""How long a question for a reply is held; the client waits 45 s."""
ABANDONED_S = 120.0
FULL_S = 1.0
"""Pause before a request that the service had no room for is tried again."""
SCHEME = "tinker://"
LOGPROB_BYTES = 8
"""A token's id and log-prob."""


class NewSamplingSession(Body, frozen=True):
    """Choose a model: by the service's name of it, by the name that its engine reports, or as `tinker://…/NAME`.

    The service's name may have a version, `NAME@VERSION`. An engine's name means no adapter. If engines of several
    models report it, it means `policy`; without a `policy` among them it is refused.
    """

    session_id: JobIdentifier
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Promise(Body, frozen=True):
    """A request under way."""

    request_id: str
    sample_sequence_ids: tuple[str, ...] = ()


@dataclass(slots=True)
class _Request:
    owner: str
    """The name of the token that made it."""
    promise: Promise
    load: int
    task: asyncio.Task[bytes]
    asked_at: float = field(default_factory=time.monotonic)
    kept_since: float = math.inf
    """When it ended, or was fetched last."""
    full: str = ""
    """Why the service has no room for it now; empty: it has."""

    @property
    def size(self) -> int:
        """Bytes of the reply of an ended request."""
        failed = self.task.cancelled() or self.task.exception() is not None
        return 0 if failed else len(self.task.result())


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
        models = await self._samples.models()
        served = models.get(name.partition("@")[0])
        if served is None:
            return _refused(404, unknown_model(name, models).message)
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
            wanted = read_sample(asked, _model_in(asked.sampling_session_id))
            if (tokens := wanted.asked.sampling.max_tokens) < LONGEST:
                _check_size(wanted.asked, wanted.asked.count * tokens)
            await self._samples.check(wanted.asked)
        except CallRefused as error:
            return _refused(404 if error.problem == Problem.NOT_FOUND else 400, error.message)
        if request_id in self._requests:  # the same request came during the check
            return self._requests[request_id].promise
        load = asked.num_samples * max(REPLY_LOAD, sum(len(chunk.tokens) for chunk in asked.prompt.chunks))
        self._make_room(call.sender.name, load)
        promise = Promise(request_id, tuple(f"{request_id}-{number}" for number in range(asked.num_samples)))
        task = asyncio.create_task(self._sampled(call.sender, request_id, wanted))
        request = self._requests[request_id] = _Request(call.sender.name, promise, load, task)
        task.add_done_callback(lambda _: self._ended(request))
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
            reply = request.task.result()
        except CallRefused as error:
            mine = error.problem in (Problem.INVALID, Problem.CONTEXT_LENGTH, Problem.TOO_LARGE, Problem.NOT_FOUND)
            return {"error": error.message, "category": "user" if mine else "server"}
        except ProrlError as error:
            return {"error": error.message, "category": "server"}
        self._keep(request)
        return web.Response(body=reply, content_type="application/x-protobuf")

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
        models = await self._samples.models()
        if named.partition("@")[0] in models:
            await self._samples.check(Asked(model=named, instances=(), sampling=Sampling()))
            return named
        by_engine = sorted(name for name, one in models.items() if one.engine == named and not one.is_adapter)
        if not by_engine:
            raise unknown_model(named, models)
        if len(by_engine) > 1 and POLICY not in by_engine:
            raise invalid(f"{named:.200} is the engine's name of {', '.join(by_engine)}: give one of these names")
        return POLICY if POLICY in by_engine else by_engine[0]

    async def _sampled(self, sender: Sender, request_id: str, wanted: Wanted) -> bytes:
        """Return the replies to a request; drop it if its client stops asking for them."""
        request = self._requests[request_id]
        work = asyncio.create_task(self._tried(sender, request, wanted))
        try:
            while not (await asyncio.wait({work}, timeout=ABANDONED_S / 4))[0]:
                if time.monotonic() - request.asked_at > ABANDONED_S:
                    del self._requests[request_id]
                    return b""
            return work.result()
        finally:
            work.cancel()
            await asyncio.wait({work})

    async def _tried(self, sender: Sender, request: _Request, wanted: Wanted) -> bytes:
        while True:
            try:
                return await self._reply(sender, wanted)
            except CallRefused as error:
                if error.problem != Problem.BUSY:
                    raise
                request.full = error.message
            await asyncio.sleep(FULL_S)

    async def _reply(self, sender: Sender, wanted: Wanted) -> bytes:
        samples = await self._samples.run_all(sender, wanted.asked)
        _check_size(wanted.asked, sum(len(sample.token_ids) for sample in samples))
        scores = samples[0].prompt_scores
        if wanted.targets is None or scores is None:
            return sample_response(wanted, samples, None)
        targets = await asyncio.to_thread(TargetLogprobs, wanted, samples[0].prompt_token_ids, scores)
        if targets.texts:
            asked = replace(wanted.asked, prompt_top=0)
            targets.add(await self._samples.score(sender, asked, [(text, ()) for text in targets.texts]))
        return sample_response(wanted, samples, targets.values)

    def _make_room(self, owner: str, load: int) -> None:
        """Drop expired replies; raise `Busy` if all tokens, or this one, have too many requests without a reply."""
        for request_id in list(self._requests):
            self._drop_expired(request_id)
        waiting = [one for one in self._requests.values() if not one.task.done()]
        if len(waiting) >= OPEN_LIMIT:
            raise Busy(f"{OPEN_LIMIT} requests of Tinker's API are open at this gateway", retry_after_s=1.0)
        own = [one.load for one in waiting if one.owner == owner]
        if len(own) >= OWN_OPEN_LIMIT or (own and sum(own) + load > LOAD_LIMIT):
            words = f"this token has {len(own)} open requests of Tinker's API with {sum(own)} tokens"
            words += f", of at most {OWN_OPEN_LIMIT} with {LOAD_LIMIT}: wait for replies"
            raise Busy(words, retry_after_s=1.0)

    def _ended(self, request: _Request) -> None:
        self._keep(request)
        self._drop_old(request)
        self._drop_oldest(request)

    def _keep(self, request: _Request) -> None:
        """Keep an ended request for `FETCHED_S` from now."""
        request.kept_since = time.monotonic()
        asyncio.get_running_loop().call_later(FETCHED_S, self._drop_expired, request.promise.request_id)

    def _drop_expired(self, request_id: str) -> None:
        """Drop a request unless it was fetched again meanwhile."""
        request = self._requests.get(request_id)
        if request is not None and request.kept_since + FETCHED_S <= time.monotonic():
            del self._requests[request_id]

    def _drop_oldest(self, ended: _Request) -> None:
        """Drop the oldest replies of all tokens that are over the limit of all, but not the latest."""
        sizes = {name: one.size for name, one in self._requests.items() if one.task.done() and one is not ended}
        total = sum(sizes.values())
        for name, size in sizes.items():
            if total <= ALL_KEPT_BYTES:
                return
            total -= size
            del self._requests[name]

    def _drop_old(self, ended: _Request) -> None:
        """Drop the oldest replies of the request's token that are over its limits."""
        owner = ended.owner
        kept = {name: one.size for name, one in self._requests.items() if one.owner == owner and one.task.done()}
        total = sum(kept.values())
        for number, (name, size) in enumerate(kept.items()):
            if total <= KEPT_BYTES and len(kept) - number <= KEPT_LIMIT:
                return
            if self._requests[name] is not ended:
                total -= size
                del self._requests[name]


ACTIVE: dict[str, Literal["active"]] = {"queue_state": "active"}


def _check_size(asked: Asked, tokens: int) -> None:
    """Raise `CallRefused` if replies of so many tokens are too large to be kept."""
    size = LOGPROB_BYTES * (1 + asked.top) * tokens
    if size > KEPT_BYTES:
        raise invalid(f"{tokens} tokens of replies have {size} bytes of log-probs (limit: {KEPT_BYTES}); ask for less")


def _model_in(sampling_session_id: str) -> str:
    return sampling_session_id.rpartition(":")[2]


def _refused(status: int, message: str) -> web.Response:
    return json_response({"error": message, "detail": message}, status)
