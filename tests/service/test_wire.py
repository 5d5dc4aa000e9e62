"""No pickle on the wire: all frames between the processes of a real service, read as what they might be."""

from __future__ import annotations

import io
import pickle
import pickletools
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
from support.waiting import until

from prorl_zmq.config import BackendBrokerSettings
from prorl_zmq.errors import MalformedMessage
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import VOCABULARY_SIZE
from prorl_zmq.testing import BrokerThreads
from prorl_zmq.wire import codec

from .conftest import scripted

if TYPE_CHECKING:
    from prorl_zmq import Job

    from .conftest import TestService


def is_pickle(frame: bytes) -> bool:
    """Tell whether a frame reads as a pickle from its first byte to its end."""
    file = io.BytesIO(frame)
    try:
        names = [opcode.name for opcode, _, _ in pickletools.genops(file)]
    except Exception:  # noqa: BLE001 - it fails in many ways on what is none
        return False
    return names[-1] == "STOP" and file.tell() == len(frame)


def test_a_pickle_would_be_known_for_one() -> None:
    assert all(is_pickle(pickle.dumps({"a": [1, "b"]}, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1))


class Tap:
    """Passes messages on between two endpoints, and keeps their frames."""

    def __init__(self, kinds: tuple[int, int], behind: str, front: str) -> None:
        self.frames: list[bytes] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._context.socket(kind) for kind in kinds]
        self._sockets[0].bind(front)
        self._sockets[1].connect(behind)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._stopper = self._context.socket(zmq.PAIR)
        self._stopper.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopper.send(b"")
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (*self._sockets, self._stop):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                return
            for here, there in (self._sockets, self._sockets[::-1]):
                if here in ready:
                    frames = here.recv_multipart()
                    self.frames += frames
                    there.send_multipart(frames)


def is_header(frame: bytes) -> bool:
    """Tell whether a frame is one of our MessagePack maps."""
    try:
        return isinstance(codec.unpack(frame), dict)
    except MalformedMessage:
        return False


@pytest.mark.proof
def test_no_frame_of_a_service_is_a_pickle(empty_service: TestService) -> None:
    service, folder = empty_service, empty_service.folder
    behind = BackendBrokerSettings(endpoint=f"ipc://{folder}/backend_behind")
    backend_brokers = BrokerThreads(msgspec.structs.replace(service.topology, backend_broker=behind))
    backend_brokers.start_backend_broker()
    service.brokers.start_rollout_broker()
    with ExitStack() as stack:
        stack.callback(backend_brokers.close)
        request, pipe = (zmq.ROUTER, zmq.DEALER), (zmq.PULL, zmq.PUSH)
        door_tap = Tap(request, service.front_door, f"ipc://{folder}/door_tap")
        stack.callback(door_tap.close)
        events_tap = Tap(pipe, service.stage_events, f"ipc://{folder}/events_tap")
        stack.callback(events_tap.close)
        backends_tap = Tap(request, behind.endpoint, service.backend_broker)
        stack.callback(backends_tap.close)
        service.front_door, service.stage_events = f"ipc://{folder}/door_tap", f"ipc://{folder}/events_tap"
        service.start_stages()
        weights = folder / "weights.npz"
        Policy.initial(PolicyShape(VOCABULARY_SIZE), 1).save(weights)  # quicker than the base policy
        service.start("-m", "prorl_zmq.cli", "prorl-engine", "--run-dir", str(folder), "--model", str(weights))
        with service.client() as client:
            until(lambda: client.backends.list(), "the engine", 60)
            client.submit([scripted(), _conversation()])
            assert [trajectory.outcome for trajectory in client.stream(timeout_s=60)] == ["completed"] * 2
            client.backends.drain(client.backends.list()[0].backend.backend_id)
        for tap in (door_tap, events_tap, backends_tap):
            assert sum(is_header(frame) for frame in tap.frames) >= 5
            assert not [frame for frame in tap.frames if is_pickle(frame)]


def _conversation() -> Job:
    return msgspec.structs.replace(scripted(run="converse"), backend_wait_s=20.0)
