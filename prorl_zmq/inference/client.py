"""`EngineClient`: a stage process's connections to engine hosts, one DEALER per endpoint, on asyncio.

    DEALER → engine host's ROUTER     empty frame, `AnyEngineRequest`, the ids of a prompt or a text
    DEALER ← engine host's ROUTER     empty frame, `AnyEngineReply`, the arrays of `Generated` or `Scored`

A request is resent only after its connection was lost and restored, which is safe (see `host`); if the connection is
down for longer than `RECONNECT_S` its requests fail. Replies are checked before use. The backend broker decides which
backend serves a job.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import contextmanager, suppress
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from ..data.scores import Scores
from ..errors import Busy, Closed, EngineFailed, MalformedMessage, ProrlError, from_info
from ..security.request_connection import AsyncRequestConnection
from ..system.traces import current_traceparent, span
from ..wire import codec
from ..wire.messages.base import Refused, new_id
from ..wire.messages.engines import (
    Abort,
    AnyEngineReply,
    EngineHealth,
    EngineReady,
    Generate,
    Generated,
    Parked,
    Score,
    Scored,
)
from .engine import NOTHING_MORE, Generation, Wanted, checked, checked_scores
from .records import check_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..security.keyring import Keyring
    from ..wire.messages.backends import Backend
    from ..wire.messages.jobs import ArrayForm, Sampling

GENERATE_TIMEOUT_S = 600.0
"""Default limit on one turn of the policy, in seconds."""
RECONNECT_S = 5.0
"""Seconds that a connection may be down before its requests fail."""
ABANDONED_S = 300.0
"""Seconds that an unused connection is kept while it is down."""

PARKED = "parked"
"""The `type` of `Parked`."""

INT32_MAX = 2**31 - 1
"""Largest weight version: a trajectory stores versions as int32."""


class EngineClient:
    """Sends requests to engine hosts for one stage process; made and used on a running loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        reconnect_s: float = RECONNECT_S,
        keyring: Keyring | None = None,
    ) -> None:
        self._context = context
        self._reconnect_s = reconnect_s
        self._keyring = keyring
        self._connections: dict[tuple[str, str], AsyncRequestConnection] = {}
        """By endpoint and key."""
        self._parked: dict[str, Callable[[Parked], None]] = {}
        """For each turn without an answer: handles `Parked`."""
        self._closed = False

    async def generate(
        self,
        backend: Backend,
        job_id: str,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        timeout_s: float = GENERATE_TIMEOUT_S,
        wanted: Wanted = NOTHING_MORE,
        adapter: str = "",
        adapter_version: int | None = None,
        age_s: float = 0.0,
        on_parked: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Have a backend continue the prompt `token_ids`, int32 [P]. Cancelling the call aborts the generation there.

        Args:
            backend: one that serves the model.
            job_id: the job of the turn.
            token_ids: the prompt.
            sampling: how tokens are drawn.
            stop_token_ids: all ids that end the turn.
            timeout_s: the limit on the answer, without the time for which the host may park the turn.
            wanted: the records; their arrays are views of the received frames. The adapter is not taken from it.
            adapter: the model of an adapter that the backend has loaded; empty: the backend's own weights.
            adapter_version: of the adapter; None: the version that was loaded last.
            age_s: of the job's group, in seconds.
            on_parked: called if the host parks the turn.

        Raises:
            EngineFailed: the backend failed, or its answer was malformed or late. `unreachable`: the backend went away
                or cannot be connected to. `refused`: the request is wrong, and no backend would accept it.
                `not_loaded`: the backend has not loaded the adapter.
            Closed: the client was closed.
        """
        with span(f"chat {backend.model}", kind="client") as traced:
            if traced is not None:
                traced.set_attributes(_asked(backend, job_id, len(token_ids), sampling))
            request = Generate(
                new_id(),
                job_id=job_id,
                sampling=sampling,
                stop_token_ids=tuple(stop_token_ids),
                life=backend.life,
                traceparent=current_traceparent(),
                record=wanted.record,
                rows_known=wanted.rows_known,
                model=adapter,
                weight_version=adapter_version,
                age_s=age_s,
            )

            def parked(parked: Parked) -> None:
                connection = self._connection(backend.endpoint, backend.curve_key)
                connection.extend(request.request_id, time.monotonic() + parked.limit_s + timeout_s)
                on_parked()

            self._parked[request.request_id] = parked
            try:
                done = await self._generated(backend, request, token_ids, timeout_s)
            finally:
                del self._parked[request.request_id]
            if traced is not None:
                traced.set_attributes(_answered(done))
        return done

    async def score(
        self,
        backend: Backend,
        job_id: str,
        token_ids: NDArray[np.int32],
        top: int,
        timeout_s: float,
        *,
        adapter: str = "",
        adapter_version: int | None = None,
    ) -> Scores:
        """Have a backend score a text, int32 [T] (`ScoringEngine.score`). Cancelling the call stops the scoring there.

        Adapters are named as for `generate`.

        Raises:
            EngineFailed, Closed: as `generate`.
            Busy: more texts wait there than may; ask again after `retry_after_s`.
        """
        request = Score(
            new_id(), job_id=job_id, top=top, life=backend.life, model=adapter, weight_version=adapter_version
        )
        with span(f"score {backend.model}", {"prorl.backend": backend.backend_id}, kind="client"):
            reply, frames = await self._request(backend, request, token_ids, timeout_s)
            with _named(backend):
                return read_scores(reply, frames, len(token_ids), top)

    async def _generated(
        self, backend: Backend, request: Generate, token_ids: NDArray[np.int32], timeout_s: float
    ) -> Generation:
        reply, frames = await self._request(backend, request, token_ids, timeout_s)
        with _named(backend):
            done = read_generation(reply, frames, request.sampling.max_tokens)
            if done.records:
                positions = len(token_ids) + len(done.token_ids) - request.rows_known - 1
                check_records(done.records, request.record, done.token_ids, positions=positions)
            return done

    async def _request(
        self, backend: Backend, request: Generate | Score, token_ids: NDArray[np.int32], timeout_s: float
    ) -> tuple[AnyEngineReply, Sequence[bytes | zmq.Frame]]:
        """Return a backend's reply to a request about token ids, and the frames after it."""
        with _named(backend):
            connection = self._connection(backend.endpoint, backend.curve_key)
            ids = np.ascontiguousarray(token_ids, np.int32).tobytes()
            try:
                answer = await connection.ask_frames(request, time.monotonic() + timeout_s, [ids])
            except (asyncio.CancelledError, ProrlError):
                with suppress(ProrlError):
                    connection.send([codec.encode(Abort(request.request_id))])
                raise
            return _read(answer)

    async def health(self, endpoint: str, timeout_s: float) -> EngineReady:
        """Ask an engine host whether it serves.

        Raises:
            RequestTimeout: it did not answer in time, or its connection was down for too long.
            EngineFailed: its answer was malformed.
        """
        connection = self._connection(endpoint)
        reply, _ = _read(await connection.ask_frames(EngineHealth(new_id()), time.monotonic() + timeout_s))
        if not isinstance(reply, EngineReady):
            raise EngineFailed(f"the engine host at {endpoint} answered with {type(reply).__name__}")
        return reply

    def close(self) -> None:
        """Close all connections; waiting calls raise `Closed`. May be called again."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _connection(self, endpoint: str, curve_key: str = "") -> AsyncRequestConnection:
        if self._closed:
            raise Closed("the engine client was closed")
        place = (endpoint, curve_key)
        if place not in self._connections:
            self._close_abandoned()
            try:
                self._connections[place] = AsyncRequestConnection(
                    self._context,
                    endpoint,
                    self._keyring,
                    resend_s=math.inf,
                    reconnect_s=self._reconnect_s,
                    curve_key=curve_key,
                    fail_if_refused=False,
                    is_interim=self._is_interim,
                    hint="",
                    copied=4,
                )
            except zmq.ZMQError as error:
                raise EngineFailed(f"no connection to {endpoint} can be opened: {error}") from error
        return self._connections[place]

    def _is_interim(self, content: dict[str, Any]) -> bool:
        if not isinstance(content, dict) or content.get("type") != PARKED:
            return False
        with suppress(MalformedMessage):
            reply: Parked = codec.convert(content, Parked)
            if reply.request_id in self._parked:
                self._parked[reply.request_id](reply)
        return True

    def _close_abandoned(self) -> None:
        """Close connections that have long been down and have no requests: hosts return under new endpoints."""
        now = time.monotonic()
        for place, connection in list(self._connections.items()):
            if not connection.waiting and connection.requester.down_s(now) > ABANDONED_S:
                self._connections.pop(place).close()


@contextmanager
def _named(backend: Backend) -> Iterator[None]:
    """Raise a failure of a request as one of its backend, which is no failure if it has too much to do."""
    try:
        yield
    except (Busy, Closed):
        raise
    except ProrlError as error:
        name, kinds = backend.backend_id, {kind: bool(error.fields.get(kind)) for kind in ("unreachable", "refused")}
        if error.fields.get("not_loaded"):
            kinds["not_loaded"] = True
        raise EngineFailed(f"backend {name}: {error.message}", backend=name, **kinds) from error


def _read(answer: Sequence[bytes | zmq.Frame]) -> tuple[AnyEngineReply, Sequence[bytes | zmq.Frame]]:
    """Return a reply and the frames after it; raise the error of a rejected request."""
    header, *frames = answer
    try:
        reply: AnyEngineReply = codec.decode(header if isinstance(header, bytes) else header.bytes, AnyEngineReply)
    except MalformedMessage as error:
        raise EngineFailed(f"the answer is malformed: {error.message}") from None
    if isinstance(reply, Refused):
        raise from_info(reply.error)
    return reply, frames


def _asked(backend: Backend, job_id: str, prompt_tokens: int, sampling: Sampling) -> dict[str, Any]:
    """Return a span's attributes for a request, by OpenTelemetry's conventions for generative AI."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "prorl_zmq",
        "gen_ai.conversation.id": job_id,
        "gen_ai.request.model": backend.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "prorl.backend": backend.backend_id,
    }
    return attributes if sampling.seed is None else {**attributes, "gen_ai.request.seed": sampling.seed}


def _answered(done: Generation) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.usage.output_tokens": len(done.token_ids),
        "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
        "gen_ai.response.finish_reasons": (done.finish_reason,),
    }
    return {**attributes, "prorl.weight_version": done.spans[-1].weight_version} if done.spans else attributes


def read_generation(reply: Any, frames: Sequence[bytes | zmq.Frame], max_tokens: int) -> Generation:
    """Make a `Generation` of a reply and the frames after it.

    Raises:
        MalformedMessage, EngineFailed: it is another reply, or its parts do not match each other or the request.
    """
    if not isinstance(reply, Generated):
        raise MalformedMessage(f"it answered a prompt with {type(reply).__name__}")
    if len(frames) != 2 + len(reply.arrays) or len(frames[0]) != len(frames[1]) or len(frames[0]) % 4:
        sizes = [len(frame) for frame in frames]
        raise MalformedMessage(
            f"token ids and log-probs come as two frames of 4 bytes per token, then {len(reply.arrays)} records; not "
            f"{sizes} bytes"
        )
    if any(not 0 <= span.weight_version <= INT32_MAX for span in reply.spans):
        raise MalformedMessage(f"a weight version is not an int32 of 0 or more: {reply.spans}")
    token_ids, logprobs = _flat(frames[0]).view(np.int32), _flat(frames[1]).view(np.float32)
    records = {form.name: _array(form, frame) for form, frame in zip(reply.arrays, frames[2:], strict=True)}
    parts = (token_ids, logprobs, reply.spans, reply.finish_reason, reply.cached_tokens, records)
    return checked(Generation(*parts, reply.again_tokens, reply.parked_s), max_tokens)


def read_scores(reply: Any, frames: Sequence[bytes | zmq.Frame], tokens: int, top: int) -> Scores:
    """Make the `Scores` of a text of a reply and the frames after it.

    Raises:
        MalformedMessage, EngineFailed: it is another reply, or its parts do not match the text.
    """
    if not isinstance(reply, Scored):
        raise MalformedMessage(f"it answered a text to score with {type(reply).__name__}")
    sizes = [len(frame) for frame in frames]
    if sizes != [4 * tokens, 4 * tokens * top, 4 * tokens * top]:
        raise MalformedMessage(f"the scores of {tokens} tokens with {top} others each do not have {sizes} bytes")
    logprobs, top_logprobs = (_flat(frames[at]).view(np.float32) for at in (0, 2))
    top_ids = _flat(frames[1]).view(np.int32).reshape(tokens, top)
    return checked_scores(
        Scores(logprobs, top_ids, top_logprobs.reshape(tokens, top), reply.weight_version), tokens, top
    )


def _array(form: ArrayForm, frame: bytes | zmq.Frame) -> NDArray[Any]:
    flat = _flat(frame)
    if flat.size != prod(form.shape) * np.dtype(form.dtype).itemsize:
        raise MalformedMessage(f"{form.name}, {form.dtype} {list(form.shape)}, came with {flat.size} bytes")
    if flat.ctypes.data % 4:
        flat = flat.copy()  # libzmq does not align small frames
    return flat.view(form.dtype).reshape(form.shape)


def _flat(frame: bytes | zmq.Frame) -> NDArray[np.uint8]:
    return np.frombuffer(frame if isinstance(frame, bytes) else frame.buffer, np.uint8)
