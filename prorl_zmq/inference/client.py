"""The engine client: a stage process's lines to engine hosts, one DEALER per endpoint, on asyncio.

    DEALER → engine host's ROUTER     empty frame, `AnyEngineRequest`, for `Generate` the prompt's ids
    DEALER ← engine host's ROUTER     empty frame, `AnyEngineReply`, for `Generated` the ids and their log-probs

Each endpoint's line owns the requests that wait for its answer. A line that breaks is noticed at once by the socket's
own events: when it is back the requests are sent again under their ids, which is safe (see `host`), and if it is not
back within `RECONNECT_S` they fail. Answers are checked as a stranger's would be, before anything is made of them.
Which backend a job talks to is not decided here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from ..errors import Closed, EngineFailed, MalformedMessage, ProrlError, RequestTimeout, from_info
from ..security.handshake import Handshake
from ..security.keyring import connect_to_peer
from ..security.peer_connection import RENEW_S
from ..system.traces import current_traceparent, span
from ..wire import codec
from ..wire.async_socket import AsyncSocket
from ..wire.messages.base import Refused, new_id
from ..wire.messages.engines import (
    Abort,
    AnyEngineReply,
    EngineHealth,
    EngineReady,
    Generate,
    Generated,
    WeightUpdate,
)
from ..wire.sockets import PROMPT_FRAME_BYTES, open_socket
from .engine import Generation, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ..security.keyring import Keyring
    from ..wire.messages.backends import Backend
    from ..wire.messages.engines import AnyEngineReply as Reply
    from ..wire.messages.engines import AnyEngineRequest, UpdateMode
    from ..wire.messages.jobs import Sampling
    from ..wire.sockets import Frame

GENERATE_TIMEOUT_S = 600.0
"""Default limit on one turn of the policy."""
RECONNECT_S = 5.0
"""How long a line may be down before its requests fail."""
RETIRE_S = 300.0
"""How long a line that failed is kept while it is down and not used."""
UNWANTED_LIMIT = 10_000

INT32_MAX = 2**31 - 1
"""A trajectory keeps weight versions as int32."""

Answer = tuple["Reply", list[bytes]]
"""A reply and the frames behind it."""


class EngineClient:
    """Asks engine hosts on behalf of one stage process; made and used on a running loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        reconnect_s: float = RECONNECT_S,
        keyring: Keyring | None = None,
    ) -> None:
        self._context = context
        self._reconnect_s = reconnect_s
        self._keyring = keyring
        self._lines: dict[tuple[str, str], _Line] = {}
        self._closed = False

    async def generate(
        self,
        backend: Backend,
        job_id: str,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> Generation:
        """Have a backend continue the prompt `token_ids`, int32 [P]. Cancelling the call aborts the generation there.

        Raises:
            EngineFailed: the backend failed, answered something malformed or not in time; with `unreachable`, it went
                away, or nobody can connect to it; with `refused`, it is the request that is wrong, and no backend would
                do it.
            Closed: the client was closed.
        """
        with span(f"chat {backend.model}", kind="client") as traced:
            if traced is not None:
                traced.set_attributes(_asked(backend, job_id, len(token_ids), sampling))
            done = await self._generated(backend, job_id, token_ids, sampling, stop_token_ids, timeout_s)
            if traced is not None:
                traced.set_attributes(_answered(done))
        return done

    async def _generated(
        self,
        backend: Backend,
        job_id: str,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Generation:
        request = Generate(
            new_id(),
            job_id=job_id,
            sampling=sampling,
            stop_token_ids=tuple(stop_token_ids),
            life=backend.life,
            traceparent=current_traceparent(),
        )
        prompt = np.ascontiguousarray(token_ids, np.int32).tobytes()
        name = backend.backend_id
        try:
            line = self._line(backend.endpoint, backend.curve_key)
            try:
                reply, frames = await line.ask(request, [prompt], timeout_s)
            except (asyncio.CancelledError, ProrlError):
                line.abort(request.request_id)
                raise
            if isinstance(reply, Refused):
                raise from_info(reply.error)
            return read_generation(reply, frames, sampling.max_tokens)
        except Closed:
            raise
        except ProrlError as error:
            kinds = {kind: bool(error.fields.get(kind)) for kind in ("unreachable", "refused")}
            raise EngineFailed(f"backend {name}: {error.message}", backend=name, **kinds) from error

    async def health(self, endpoint: str, timeout_s: float) -> EngineReady:
        """Ask an engine host whether it serves.

        Raises:
            RequestTimeout: it did not answer in time.
            EngineFailed: it went away or answered something malformed.
        """
        return await self._ask_ready(endpoint, EngineHealth(new_id()), timeout_s)

    async def update_weights(
        self, endpoint: str, path: Path, weight_version: int, timeout_s: float, mode: UpdateMode = "keep"
    ) -> EngineReady:
        """Have an engine host serve the weights at `path`, as it sees it, from its next token on.

        Raises:
            InvalidWeights: it cannot use them; nothing has changed.
            RequestTimeout: it did not answer in time, and may or may not have taken them.
            EngineFailed: it went away or answered something malformed.
        """
        return await self._ask_ready(
            endpoint, WeightUpdate(new_id(), "load", weight_version, str(path), mode), timeout_s
        )

    def close(self) -> None:
        """Close all lines; what waits for an answer gets `Closed`. May be called again."""
        self._closed = True
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    async def _ask_ready(self, endpoint: str, request: EngineHealth | WeightUpdate, timeout_s: float) -> EngineReady:
        reply, _ = await self._line(endpoint).ask(request, [], timeout_s)
        if isinstance(reply, Refused):
            raise from_info(reply.error)
        if not isinstance(reply, EngineReady):
            raise EngineFailed(f"the engine host at {endpoint} answered with {type(reply).__name__}")
        return reply

    def _line(self, endpoint: str, curve_key: str = "") -> _Line:
        if self._closed:
            raise Closed("the engine client was closed")
        place = (endpoint, curve_key)
        line = self._lines.get(place)
        if line is None:
            try:
                line = _Line(self._context, place, self._keyring, self._reconnect_s, partial(self._retire, place))
            except zmq.ZMQError as error:
                raise EngineFailed(f"no line to {endpoint} can be opened: {error}") from error
            self._lines[place] = line
        return line

    def _retire(self, place: tuple[str, str]) -> None:
        """Close a line that has long been down and that nobody waits at: hosts come and go under new endpoints."""
        self._lines.pop(place).close()


@dataclass(frozen=True, slots=True)
class _Pending:
    frames: list[Frame]
    answer: asyncio.Future[Answer]


class _Line:
    """The socket to one engine host, and what waits for its answers."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        place: tuple[str, str],
        keyring: Keyring | None,
        reconnect_s: float,
        on_retire: Callable[[], None],
    ) -> None:
        endpoint, curve_key = place
        self._endpoint = endpoint
        self._reconnect_s = reconnect_s
        self._on_retire = on_retire
        self._unwanted: deque[str] = deque(maxlen=UNWANTED_LIMIT)
        """Requests that were given up while the line was down: the host may still work on them."""
        self._retiring: asyncio.TimerHandle | None = None
        self._pending: dict[str, _Pending] = {}
        self._loop = asyncio.get_running_loop()
        # A line that is down has a timer; a new one is down until its first connection.
        self._down: asyncio.TimerHandle | None = None
        self._renewal: asyncio.TimerHandle | None = None
        with ExitStack() as undo:
            self._raw = open_socket(context, zmq.DEALER, PROMPT_FRAME_BYTES)
            undo.callback(self._raw.close)
            self._handshake = Handshake(self._raw, endpoint, keyring)
            self._events = AsyncSocket(self._handshake.watch(), self._changed, copied=2)
            undo.callback(self._events.close)
            undo.callback(self._handshake.stop)
            connect_to_peer(self._raw, endpoint, curve_key, keyring)
            undo.pop_all()
        self._socket = AsyncSocket(self._raw, self._receive, copied=4)
        self._went_down()

    async def ask(self, request: AnyEngineRequest, payload: list[bytes], timeout_s: float) -> Answer:
        """Send a request and wait for the answer.

        Raises:
            RequestTimeout: there was none in time.
            EngineFailed: the line is down.
            Closed: it was closed.
        """
        frames: list[Frame] = [b"", codec.encode(request), *payload]
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._pending[request.request_id] = _Pending(frames, answer)
        if self._down is None:
            self._socket.send(frames)
        elif self._down.when() <= self._loop.time() or self._down.cancelled():
            self._went_down()  # gone for long; this request has its own chance
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            message = f"the engine host at {self._endpoint} did not answer within {timeout_s:g} s"
            raise RequestTimeout(message, timeout_s=timeout_s) from None
        finally:
            self._pending.pop(request.request_id, None)

    def abort(self, request_id: str) -> None:
        """Tell the host that nobody waits for this any more, as soon as the line is up."""
        if self._down is None:
            self._socket.send([b"", codec.encode(Abort(request_id))])
        else:
            self._unwanted.append(request_id)

    def close(self) -> None:
        """Close the sockets; what waits gets `Closed`."""
        for timer in (self._down, self._retiring, self._renewal):
            if timer is not None:
                timer.cancel()
        self._handshake.stop()
        self._events.close()
        self._socket.close()
        self._fail(Closed("the engine client was closed"))

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        parts = [frame if isinstance(frame, bytes) else frame.bytes for frame in frames[1:]]
        try:
            content = codec.unpack(parts[0] if parts else b"")
        except MalformedMessage as error:
            self._fail(EngineFailed(f"the engine host at {self._endpoint} sent what is no message: {error.message}"))
            return
        pending = self._pending.get(codec.request_id(content))
        if pending is None or pending.answer.done():
            return
        try:
            pending.answer.set_result((codec.convert(content, AnyEngineReply), parts[1:]))
        except MalformedMessage as error:
            pending.answer.set_exception(EngineFailed(f"the answer is malformed: {error.message}"))

    def _changed(self, frames: list[bytes | zmq.Frame]) -> None:
        event = self._handshake.note([frame if isinstance(frame, bytes) else frame.bytes for frame in frames])
        if event == zmq.Event.HANDSHAKE_SUCCEEDED and self._down is not None:
            self._down.cancel()
            self._down = None
            while self._unwanted:
                self.abort(self._unwanted.popleft())
            for pending in self._pending.values():
                self._socket.send(pending.frames)
        elif event == zmq.Event.DISCONNECTED and self._down is None:
            self._went_down()
        if self._handshake.refused and self._renewal is None:
            self._renewal = self._loop.call_later(RENEW_S, self._renew)

    def _renew(self) -> None:
        self._renewal = None
        self._handshake.renew()

    def _went_down(self) -> None:
        self._down = self._loop.call_later(self._reconnect_s, self._give_up)

    def _give_up(self) -> None:
        message = f"no connection to the engine host at {self._endpoint} for {self._reconnect_s:g} s"
        why = f": {self._handshake.problem}" if self._handshake.problem else ""
        self._fail(EngineFailed(message + why, unreachable=True))

    def _fail(self, error: EngineFailed | Closed) -> None:
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)
        if self._retiring is None and self._down is not None and isinstance(error, EngineFailed):
            self._retiring = self._loop.call_later(RETIRE_S, self._retire)

    def _retire(self) -> None:
        self._retiring = None
        if self._down is not None and not self._pending:
            self._on_retire()


def _asked(backend: Backend, job_id: str, prompt_tokens: int, sampling: Sampling) -> dict[str, Any]:
    """Return what a span says of a request, by OpenTelemetry's conventions for generative AI."""
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


def read_generation(reply: Any, frames: Sequence[bytes], max_tokens: int) -> Generation:
    """Make a `Generation` of a reply and the frames behind it.

    Raises:
        MalformedMessage, EngineFailed: it is another reply, or its parts do not fit together or to the request.
    """
    if not isinstance(reply, Generated):
        raise MalformedMessage(f"it answered a prompt with {type(reply).__name__}")
    if len(frames) != 2 or len(frames[0]) != len(frames[1]) or len(frames[0]) % 4:
        sizes = [len(frame) for frame in frames]
        raise MalformedMessage(f"token ids and log-probs come as two frames of 4 bytes per token, not {sizes} bytes")
    if any(not 0 <= span.weight_version <= INT32_MAX for span in reply.spans):
        raise MalformedMessage(f"a weight version is not an int32 of 0 or more: {reply.spans}")
    token_ids, logprobs = np.frombuffer(frames[0], np.int32), np.frombuffer(frames[1], np.float32)
    return checked(Generation(token_ids, logprobs, reply.spans, reply.finish_reason, reply.cached_tokens), max_tokens)
