"""A node's broker over real sockets, with the test as the rollout broker and as the only stage process."""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import zmq
from msgspec.structs import replace

from prorl_zmq.brokers.node.node_broker import NodeBroker
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION
from prorl_zmq.wire.messages.jobs import Job, Phase
from prorl_zmq.wire.messages.nodes import NodeFacts
from prorl_zmq.wire.messages.stages import (
    EventsNoted,
    MemberAlive,
    PhaseDone,
    PhaseFailed,
    ShowTurns,
    StageCommand,
    StageEvent,
    StageReport,
    StageWelcome,
    StartPhase,
    Task,
    TurnsShown,
)
from prorl_zmq.wire.messages.watching import TurnsSoFar
from prorl_zmq.wire.sockets import bind, connect, open_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

WAIT_S = 10.0
Message = TypeVar("Message")


class Peers:
    """The node's broker between a rollout broker and a stage process with one slot, both in the test's hands."""

    def __init__(self, folder: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.folder = folder
        self.events = open_socket(context, zmq.PULL)
        bind(self.events, f"ipc://{folder}/rollout")
        self.commands = open_socket(context, zmq.PUSH)
        self.inbox = open_socket(context, zmq.PULL)
        bind(self.inbox, f"ipc://{folder}/run")
        self.said = open_socket(context, zmq.PUSH)
        connect(self.said, f"ipc://{folder}/stage_events")

    def join(self) -> None:
        """Welcome the node, and report as a stage process, until the node says that it has the slot."""
        self.report(welcomed=False)
        announced = self.event(StageReport)
        assert announced.slots == 0
        connect(self.commands, announced.endpoint)
        self.command(StageWelcome(backend_broker="ipc://backends", heartbeat_s=0.1))
        deadline = time.monotonic() + WAIT_S
        while self.event(StageReport).slots != 1:
            assert time.monotonic() < deadline
            self.report(welcomed=True)

    def report(self, *, welcomed: bool) -> None:
        report = StageReport(
            protocol=PROTOCOL_VERSION,
            stage_id="run-1",
            role=Phase.RUN,
            node="n",
            slots=1,
            endpoint=f"ipc://{self.folder}/run",
            tasks=(Task("math"),),
            welcomed=welcomed,
        )
        self.said.send(codec.encode(report))

    def start(self, job_id: str) -> None:
        job = Job(task="math", instance={}, job_id=job_id)
        self.command(StartPhase(job_id=job_id, attempt=1, phase=Phase.RUN), codec.encode(job))

    def command(self, command: StageCommand, *frames: bytes) -> None:
        self.commands.send_multipart([codec.encode(command), *frames])

    def event(self, kind: type[Message]) -> Message:
        """Return the next event of a kind that the rollout broker gets."""
        return _next(self.events, StageEvent, kind)

    def told(self, kind: type[Message]) -> Message:
        """Return the next command of a kind that the stage process gets."""
        return _next(self.inbox, StageCommand, kind)


def _next(socket: zmq.Socket[bytes], messages: Any, kind: type[Message]) -> Message:
    deadline = time.monotonic() + WAIT_S
    while (left := deadline - time.monotonic()) > 0:
        if socket.poll(int(1000 * left)):
            message = codec.decode(socket.recv_multipart()[0], messages)
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__} came within {WAIT_S:g} s")


@contextmanager
def joined(facts: Callable[[], NodeFacts] = NodeFacts) -> Iterator[Peers]:
    with tempfile.TemporaryDirectory(prefix="prorl-") as folder, zmq.Context() as context:
        broker = NodeBroker(
            node="n",
            place="here",
            node_id="n-1",
            stage_events=f"ipc://{folder}/stage_events",
            bind="tcp://127.0.0.1:*",
            run_dir=Path(folder),
            places=lambda: {"rollout-0": f"ipc://{folder}/rollout"},
            facts=facts,
        )
        thread = threading.Thread(target=broker.run)
        thread.start()
        peers = Peers(folder, context)
        try:
            peers.join()
            yield peers
        finally:
            broker.stop()
            thread.join(WAIT_S)
            context.destroy(linger=0)
        assert not thread.is_alive()


def done(job_id: str, origin: str) -> PhaseDone:
    return PhaseDone(stage_id="run-1", job_id=job_id, attempt=1, phase=Phase.RUN, number=7, origin=origin)


def test_a_phase_passes_the_node_and_its_end_comes_back_under_the_nodes_own_number() -> None:
    with joined() as peers:
        peers.start("a")
        started = peers.told(StartPhase)
        assert (started.job_id, started.origin) == ("a", "rollout-0")
        peers.said.send(codec.encode(done("a", started.origin)))
        end = peers.event(PhaseDone)
        assert (end.stage_id, end.job_id, end.number, end.origin) == ("run-n-1", "a", 1, "")
        peers.command(EventsNoted((1,)))
        assert peers.told(EventsNoted).numbers == (7,)


def test_a_phase_that_finds_no_slot_starts_as_soon_as_one_is_free() -> None:
    with joined() as peers:
        peers.start("a")
        peers.start("b")
        origin = peers.told(StartPhase).origin
        peers.said.send(codec.encode(done("a", origin)))
        assert peers.told(StartPhase).job_id == "b"


def test_a_phase_that_finds_no_slot_in_time_is_given_back_and_has_spent_no_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given back at once, it was sent here again at once: one job came to attempt 3285."""
    monkeypatch.setattr("prorl_zmq.brokers.node.node_broker.LOCAL_QUIET_S", 1.0)
    with joined() as peers:
        peers.start("a")
        assert peers.told(StartPhase).job_id == "a"
        began = time.monotonic()
        peers.start("b")
        given = peers.event(PhaseFailed)
        assert time.monotonic() - began >= 1.0
        assert (given.stage_id, given.job_id, given.retry, given.given_back) == ("run-n-1", "b", True, True)


def test_the_address_of_a_rollout_passes_the_node_at_once() -> None:
    with joined() as peers:
        peers.start("a")
        peers.told(StartPhase)
        address = "http://127.0.0.1:1/rollouts/a"
        news = MemberAlive(member="run-1", number=1, began={"run-1": {"a": 1}}, addresses={"a": (1, address)})
        peers.said.send(codec.encode(news))
        told: Any = {}
        while not told:  # with whichever report is due
            told = _next(peers.events, StageEvent, (MemberAlive, StageReport)).addresses  # type: ignore[arg-type]
        assert told in ({"a": (1, address)}, {"a": address})


def test_a_broken_job_of_a_rollout_broker_is_dropped_and_the_next_one_starts() -> None:
    with joined() as peers:
        peers.command(StartPhase(job_id="a", attempt=1, phase=Phase.RUN), b"no job")
        peers.start("b")
        assert peers.told(StartPhase).job_id == "b"


def test_the_machine_is_told_with_full_reports_and_then_only_if_it_has_changed() -> None:
    now = [NodeFacts(host="h", memory_free_bytes=50, memory_total_bytes=100)]
    with joined(lambda: now[0]) as peers:
        peers.command(StageWelcome(backend_broker="ipc://backends", heartbeat_s=0.1))
        assert peers.event(StageReport).facts == now[0]
        now[0] = replace(now[0], memory_free_bytes=52)
        assert [peers.event(MemberAlive).facts for _ in range(5)] == [None] * 5
        now[0] = replace(now[0], memory_free_bytes=40)
        told = [peers.event(MemberAlive).facts for _ in range(5)]
        assert [facts for facts in told if facts is not None] == [now[0]]


def test_who_asks_for_turns_is_answered_by_the_process_that_has_the_phase() -> None:
    with joined() as peers:
        peers.command(ShowTurns(job_id="a", attempt=1, known_tokens=5))
        none = peers.event(TurnsShown)
        assert none == TurnsShown(stage_id="run-n-1", job_id="a", attempt=1, known_tokens=5)
        peers.start("a")
        peers.told(StartPhase)
        peers.command(ShowTurns(job_id="a", attempt=1, known_tokens=5))
        question = peers.told(ShowTurns)
        assert question == ShowTurns(job_id="a", attempt=1, known_tokens=5, origin="rollout-0")
        so_far = TurnsSoFar(turns=1, tokens=2, shown_turns=1, shown_tokens=2)
        answer = TurnsShown(stage_id="run-1", job_id="a", attempt=1, known_tokens=5, origin="rollout-0", so_far=so_far)
        for origin in ("nobody", "rollout-0"):
            peers.said.send_multipart([codec.encode(replace(answer, origin=origin)), b"block"])
        assert peers.event(TurnsShown) == replace(answer, stage_id="run-n-1", origin="")
