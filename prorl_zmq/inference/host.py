"""The engine host: one engine behind a ROUTER, and its registration with the backend broker.

    anyone ⇄ ROUTER, bound here           `AnyEngineRequest` / `AnyEngineReply`
    DEALER ⇄ backend broker's ROUTER      see `registration`

The host owns the generations under way, by request id. A client that lost its connection sends its requests again: one
that still runs is not run twice, its answer goes to where it was asked from last; one that is not known is run, which
is always right, since an engine keeps nothing between requests. On SIGTERM or SIGINT the host takes itself off the
broker's list, answers what still runs with `EngineFailed` (updates, if they do not end soon), and exits with 0; killed,
it is missed by the broker's lease and by its clients' sockets.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import uvloop
import zmq

from .. import codec
from ..aio import AsyncSocket
from ..errors import (
    EngineFailed,
    ErrorInfo,
    InternalError,
    InvalidWeights,
    MalformedMessage,
    ProrlError,
)
from ..messages import (
    Abort,
    AnyEngineRequest,
    Backend,
    EngineHealth,
    EngineReady,
    EngineRefused,
    Generate,
    Generated,
    UpdateWeights,
)
from ..processes import stop_signals
from ..sockets import bind, open_socket, split_envelope
from .base_policy import build_base_policy
from .embedded_engine import EmbeddedEngine
from .policy import Policy, one_blas_thread
from .registration import HEARTBEAT_S, Registration
from .tokenizer import VOCABULARY_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..messages import AnyEngineReply
    from ..sockets import Frame
    from .engine import Engine

UPDATES_S = 2.0
"""Longest wait, when closing, for new weights that are being read."""

log = logging.getLogger("prorl.engine")


class EngineHost:
    """Serves one engine until it is closed; made and used on a running loop.

    Args:
        context: the process's ZeroMQ context.
        engine: what to serve; closed with the host.
        endpoint: where to bind (`ipc://PATH` or `tcp://HOST:PORT`, where PORT may be `*`).
        backend_broker: the backend broker's endpoint.
        backend_id: the name to register under.
        heartbeat_s: seconds between heartbeats.
        insecure: allow plaintext TCP beyond loopback.

    Raises:
        InvalidEndpoint, EndpointInUse: the endpoint cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        engine: Engine,
        *,
        endpoint: str,
        backend_broker: str,
        backend_id: str,
        heartbeat_s: float = HEARTBEAT_S,
        insecure: bool = False,
    ) -> None:
        self._engine = engine
        router = open_socket(context, zmq.ROUTER)
        try:
            self.endpoint = bind(router, endpoint, insecure=insecure)
            self._registration = Registration(context, backend_broker, self._backend(backend_id), heartbeat_s)
        except BaseException:
            router.close()
            raise
        self._router = AsyncSocket(router, self._receive, copied=8)
        self._generations: dict[str, asyncio.Task[None]] = {}
        self._envelopes: dict[str, Sequence[Frame]] = {}
        """Where the answer to each generation goes."""
        self._updates: set[asyncio.Task[None]] = set()
        self._closing = False

    async def run(self, stop: asyncio.Event) -> None:
        """Register, serve until `stop` is set, and close."""
        try:
            await self._registration.run(stop, lambda: self._engine.weight_version)
        finally:
            await self.close()

    async def close(self) -> None:
        """Leave the backend broker, refuse what still runs, and close the engine and the sockets. May be repeated."""
        if self._closing:
            return
        self._closing = True
        await self._engine.close()
        tasks = [*self._generations.values(), *self._updates]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=UPDATES_S)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks, timeout=UPDATES_S)
        await self._registration.close()
        self._router.close(linger_ms=200)

    def _backend(self, backend_id: str) -> Backend:
        return Backend(
            backend_id=backend_id,
            endpoint=self.endpoint,
            chat_format=self._engine.chat_format,
            weight_version=self._engine.weight_version,
        )

    # Requests ---------------------------------------------------------------------------------------------------------

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            envelope, message = split_envelope(frames)
        except MalformedMessage as error:
            log.warning("dropped a message: %s", error)
            return
        request_id = "unknown"
        try:
            content = codec.unpack(_bytes(message[0]))
            request_id = codec.request_id(content)
            request: AnyEngineRequest = codec.convert(content, AnyEngineRequest)
            expected = 2 if isinstance(request, Generate) else 1
            if len(message) != expected:
                raise MalformedMessage(f"{type(request).__name__} has {expected} frames, not {len(message)}")
            if self._closing:
                raise EngineFailed("the engine host is stopping")
            self._serve(envelope, request, message)
        except ProrlError as error:
            self._send(envelope, EngineRefused(request_id, error.info()))

    def _serve(
        self, envelope: Sequence[Frame], request: AnyEngineRequest, message: Sequence[bytes | zmq.Frame]
    ) -> None:
        match request:
            case Generate():
                token_ids = token_array(message[1])  # first: a malformed request must leave nothing behind
                self._envelopes[request.request_id] = envelope
                if request.request_id not in self._generations:
                    task = asyncio.create_task(self._generate(request, token_ids))
                    self._generations[request.request_id] = task
            case Abort():
                task_or_none = self._generations.get(request.request_id)
                if task_or_none is not None:
                    task_or_none.cancel()
            case EngineHealth():
                self._send(envelope, self._ready(request.request_id))
            case UpdateWeights():
                update = asyncio.create_task(self._update(envelope, request))
                self._updates.add(update)
                update.add_done_callback(self._updates.discard)

    async def _generate(self, request: Generate, token_ids: NDArray[np.int32]) -> None:
        request_id = request.request_id
        try:
            done = await self._engine.generate(token_ids, request.sampling, request.stop_token_ids, request.job_id)
            header = codec.encode(Generated(request_id, finish_reason=done.finish_reason, spans=done.spans))
            arrays = [done.token_ids.data.cast("B"), done.logprobs.data.cast("B")]
            self._router.send([*self._envelopes[request_id], header, *arrays])
        except asyncio.CancelledError:
            log.debug("generation %s was aborted", request_id)
        except Exception as error:  # noqa: BLE001 - a fault of the engine is the client's to know of, not the host's end
            self._send(self._envelopes[request_id], EngineRefused(request_id, _describe(error)))
        finally:
            del self._generations[request_id], self._envelopes[request_id]

    async def _update(self, envelope: Sequence[Frame], request: UpdateWeights) -> None:
        try:
            await self._engine.update_weights(Path(request.path), request.weight_version)
        except asyncio.CancelledError:
            stopped = EngineFailed(f"the engine host stopped before it had read {request.path}")
            self._send(envelope, EngineRefused(request.request_id, stopped.info()))
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._send(envelope, EngineRefused(request.request_id, _describe(error)))
        else:
            self._registration.announce(self._engine.weight_version)
            self._send(envelope, self._ready(request.request_id))

    def _ready(self, request_id: str) -> EngineReady:
        return EngineReady(request_id, self._engine.weight_version, len(self._generations))

    def _send(self, envelope: Sequence[Frame], reply: AnyEngineReply) -> None:
        self._router.send([*envelope, codec.encode(reply)])


def token_array(frame: bytes | zmq.Frame) -> NDArray[np.int32]:
    """Give a frame as int32 [N].

    Raises:
        MalformedMessage: its size is not a multiple of 4 bytes.
    """
    data = _bytes(frame)
    if len(data) % 4:
        raise MalformedMessage(f"token ids are int32, 4 bytes each; a frame of {len(data)} bytes holds something else")
    return np.frombuffer(data, np.int32)


def run_engine_host(
    *,
    endpoint: str,
    backend_broker: str,
    backend_id: str,
    model: Path | None = None,
    heartbeat_s: float = HEARTBEAT_S,
    insecure: bool = False,
) -> None:
    """Be an engine host with the embedded engine until SIGTERM or SIGINT; the process's main.

    Args:
        endpoint: where to bind (`ipc://PATH` or `tcp://HOST:PORT`, where PORT may be `*`).
        backend_broker: the backend broker's endpoint.
        backend_id: the name to register under.
        model: the policy's weights (.npz); None builds the base policy.
        heartbeat_s: seconds between heartbeats.
        insecure: allow plaintext TCP beyond loopback.

    Raises:
        InvalidWeights: the model cannot be used.
        InvalidEndpoint, EndpointInUse: the endpoint cannot be bound.
    """
    policy = build_base_policy() if model is None else Policy.load(model)
    if policy.shape.vocabulary != VOCABULARY_SIZE:
        raise InvalidWeights(
            f"{model} has {policy.shape.vocabulary} tokens, the embedded chat format {VOCABULARY_SIZE}", path=str(model)
        )

    async def main() -> None:
        stop = asyncio.Event()
        with stop_signals(stop.set):
            host = EngineHost(
                context,
                EmbeddedEngine(policy),
                endpoint=endpoint,
                backend_broker=backend_broker,
                backend_id=backend_id,
                heartbeat_s=heartbeat_s,
                insecure=insecure,
            )
            log.info("engine %s serves at %s", backend_id, host.endpoint)
            await host.run(stop)

    with one_blas_thread(), zmq.Context() as context:
        uvloop.run(main())


def _bytes(frame: bytes | zmq.Frame) -> bytes:
    return frame if isinstance(frame, bytes) else frame.bytes


def _describe(error: Exception) -> ErrorInfo:
    if isinstance(error, ProrlError):
        return error.info()
    log.error("the engine failed", exc_info=error)
    return InternalError(f"the engine failed: {type(error).__name__}: {error}").info()
