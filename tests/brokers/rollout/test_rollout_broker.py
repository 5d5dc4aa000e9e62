"""The rollout broker's process over real sockets, with the test as trainer and as stage processes."""

from __future__ import annotations

import asyncio
import math
import tempfile
import threading
import time
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from prorl_zmq import AsyncRolloutClient, RolloutClient
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.rollout.rollout_broker import RolloutBroker
from prorl_zmq.config import RolloutBrokerSettings, ServiceSettings, Topology
from prorl_zmq.data.trajectory import Role, Trajectory, block_bytes
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import InvalidEndpoint, JournalFailed
from prorl_zmq.system.pauses import PAUSE_S
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION, UNSAID_PROTOCOL
from prorl_zmq.wire.messages.front_door import Accepted, Collect, Collected, FrontDoorReply, RelayBlocks, Status, Submit
from prorl_zmq.wire.messages.jobs import BlockHandle, ConversationPart, Job, Outcome, Phase
from prorl_zmq.wire.messages.nodes import NodeFacts
from prorl_zmq.wire.messages.stages import (
    BlockSent,
    ForgetBlocks,
    PhaseDone,
    SendBlocks,
    StageCommand,
    StageRefused,
    StageReport,
    StageWelcome,
    StartPhase,
    Task,
)
from prorl_zmq.wire.sockets import bind, connect, open_socket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

WAIT_MS = 10_000
KEPT_BLOCK = bytes(range(block_bytes(5, 1)))


@pytest.fixture
def topology() -> Iterator[Topology]:
    with tempfile.TemporaryDirectory(prefix="prorl-") as folder:
        yield Topology(
            service=ServiceSettings(run_dir=folder),
            rollout_broker=RolloutBrokerSettings(heartbeat_s=10.0, lease_s=30.0),
        )


@contextmanager
def running(topology: Topology, journal: Journal) -> Iterator[RolloutBroker]:
    broker = RolloutBroker(topology, journal)
    thread = threading.Thread(target=broker.run)
    thread.start()
    try:
        yield broker
    finally:
        broker.stop()
        thread.join(10.0)
        assert not thread.is_alive()


class Stage:
    """A stage process that does what the test says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], topology: Topology, role: Phase) -> None:
        self.stage_id = f"{role}-1"
        self.role = role
        self.inbox = open_socket(context, zmq.PULL)
        self.endpoint = bind(self.inbox, f"ipc://{topology.service.run_dir}/{self.stage_id}")
        self.outbox = open_socket(context, zmq.PUSH)
        connect(self.outbox, topology.endpoint(topology.rollout_broker.stage_events))

    def report(
        self,
        protocol: int = PROTOCOL_VERSION,
        facts: NodeFacts | None = None,
        kept: tuple[str, ...] | None = None,
        **running: int,
    ) -> None:
        report = StageReport(
            protocol=protocol,
            stage_id=self.stage_id,
            role=self.role,
            node="local",
            slots=4,
            endpoint=self.endpoint,
            tasks=(Task("math", {"n": "int"}),),
            welcomed=True,
            running=running,
            facts=facts,
            kept=kept,
        )
        self.outbox.send(codec.encode(report))

    def receive(self, kind: type[Any]) -> Any:
        assert self.inbox.poll(WAIT_MS), f"no {kind.__name__}"
        header, *self.rest = self.inbox.recv_multipart()
        command = codec.decode(header, StageCommand)
        assert isinstance(command, kind)
        return command

    def done(self, start: StartPhase, *frames: Any, **more: Any) -> None:
        event = PhaseDone(stage_id=self.stage_id, job_id=start.job_id, attempt=start.attempt, phase=start.phase, **more)
        self.outbox.send_multipart([codec.encode(event), *frames])


class Trainer:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], topology: Topology) -> None:
        self.socket = open_socket(context, zmq.REQ)
        connect(self.socket, topology.endpoint(topology.rollout_broker.front_door))

    def ask(self, request: Any, *frames: bytes) -> Any:
        self.socket.send_multipart([codec.encode(request), *frames])
        assert self.socket.poll(WAIT_MS), "no reply"
        header, *self.blocks = self.socket.recv_multipart()
        return codec.decode(header, FrontDoorReply)

    def collect(self, *acknowledge: str, wait_s: float = 10.0) -> Collected:
        reply = self.ask(Collect("collect", "s", "client", acknowledge, wait_s=wait_s))
        assert isinstance(reply, Collected)
        return reply


class Peers:
    """Makes stage processes and trainers, and closes their sockets."""

    def __init__(self, topology: Topology) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.topology = topology
        self.made: list[Stage | Trainer] = []

    def stage(self, role: Phase) -> Stage:
        stage = Stage(self.context, self.topology, role)
        self.made.append(stage)
        return stage

    def trainer(self) -> Trainer:
        trainer = Trainer(self.context, self.topology)
        self.made.append(trainer)
        return trainer


@pytest.fixture
def peers(topology: Topology) -> Iterator[Peers]:
    peers = Peers(topology)
    yield peers
    peers.context.destroy(linger=0)


def five_tokens() -> TrajectoryBuilder:
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.USER)
    builder.add_context(np.arange(5, dtype=np.int32))
    return builder


def test_a_broker_started_anew_takes_up_what_its_journal_holds(topology: Topology, peers: Peers) -> None:
    journal = Journal()
    stages = {role: peers.stage(role) for role in Phase}
    trainer = peers.trainer()
    builder = five_tokens()

    with running(topology, journal):
        for stage in stages.values():
            stage.report()
            assert stage.receive(StageWelcome).heartbeat_s == 10.0
        jobs = [Job(task="math", instance={"n": n}, job_id=f"job-{n}") for n in range(2)]
        assert trainer.ask(Submit("r", "s"), *(codec.encode(job) for job in jobs)) == Accepted(
            "r", 2, journal.journal_id
        )
        first = stages[Phase.INIT].receive(StartPhase)
        assert codec.decode(stages[Phase.INIT].rest[0], Job) == jobs[0]
        stages[Phase.INIT].receive(StartPhase)  # of the second job, which goes no further
        stages[Phase.INIT].done(first, phase_data={"from": "init"})
        run = stages[Phase.RUN].receive(StartPhase)
        assert run.phase_data == {"from": "init"}
        stages[Phase.RUN].done(run, builder.block().data, tokens=5, turns=1)
        stages[Phase.EVAL].done(stages[Phase.EVAL].receive(StartPhase), reward=0.5)
        assert [result.job_id for result in trainer.collect().results] == ["job-0"]  # and the reply is "lost"

    with running(topology, journal):
        reply = trainer.collect()
        (result,) = reply.results
        assert (result.job_id, result.outcome, result.reward) == ("job-0", Outcome.COMPLETED, 0.5)
        assert Trajectory.from_frame(result, trainer.blocks[0]).token_ids.tolist() == [0, 1, 2, 3, 4]
        assert reply.remaining == 1
        stages[Phase.INIT].report(**{"job-1": 1})
        stages[Phase.INIT].receive(StageWelcome)
        (status,) = trainer.ask(Status("status")).stages  # it goes on with what it has
        assert (status.stage_id, status.busy) == ("init-1", 1)
        trainer.collect("job-0", wait_s=0.0)

    left = journal.recover()
    assert left.uncollected == []
    assert [(state.job_id, state.stage_id, state.attempt) for state in left.unfinished] == [("job-1", "init-1", 1)]


PARTS = (ConversationPart("white", 0, 1, stop_reason="environment"), ConversationPart("user", 1, 1, trained=False))


def test_a_result_has_its_conversations_and_the_rewards_of_its_turns(topology: Topology, peers: Peers) -> None:
    stages, trainer = {role: peers.stage(role) for role in Phase}, peers.trainer()
    with running(topology, Journal()):
        for stage in stages.values():
            stage.report()
            stage.receive(StageWelcome)
        trainer.ask(Submit("r", "s"), codec.encode(Job(task="math", instance={"n": 1}, job_id="a")))
        stages[Phase.INIT].done(stages[Phase.INIT].receive(StartPhase))
        run, block = stages[Phase.RUN].receive(StartPhase), five_tokens().block().data
        fitting: dict[str, Any] = {"tokens": 5, "turns": 1, "segments": (2,)}
        for unfit in ({"conversations": PARTS[:1]}, {"turn_rewards": ((1, 0.5),)}):
            stages[Phase.RUN].done(run, block, **fitting, **unfit)  # dropped
        stages[Phase.RUN].done(run, block, **fitting, conversations=PARTS, turn_rewards=((0, -0.5),))
        start = stages[Phase.EVAL].receive(StartPhase)
        assert start.conversations == ("white", "user")
        stages[Phase.EVAL].done(start, reward=0.0, rewards={"white": math.nan})  # dropped
        stages[Phase.EVAL].done(start, reward=-7.5, rewards={"white": 2.0})
        (result,) = trainer.collect().results
        assert result.reward == -7.5
        assert result.conversations == (replace(PARTS[0], reward=2.0), PARTS[1])
        assert result.turn_rewards == ((0, -0.5),)


class StallingJournal(Journal):
    """Its first write takes so long that the broker sees it as a pause of its own."""

    stall_s = PAUSE_S + 0.2

    def write(self, *changes: Any) -> None:
        time.sleep(self.stall_s)
        self.stall_s = 0.0
        super().write(*changes)


@pytest.mark.parametrize("journal", [Journal, StallingJournal])
def test_a_stage_process_that_dies_is_missed_long_before_its_lease_ends(
    topology: Topology, peers: Peers, journal: type[Journal]
) -> None:
    settings = RolloutBrokerSettings(heartbeat_s=0.2, lease_s=600.0)
    topology = replace(topology, rollout_broker=settings)
    with running(topology, journal()):
        dies, lives = peers.stage(Phase.INIT), peers.stage(Phase.RUN)
        for stage in (dies, lives):
            stage.report()
            stage.receive(StageWelcome)
        trainer = peers.trainer()
        trainer.ask(Submit("r", "s"), codec.encode(Job(task="math", instance={"n": 1}, job_id="a")))
        dies.receive(StartPhase)
        dies.inbox.close()
        for _ in range(100):
            status = trainer.ask(Status("status"))
            if status.redelivered:
                break
            lives.report()
            time.sleep(0.1)
        assert status.redelivered == 1
        assert [stage.stage_id for stage in status.stages] == ["run-1"]


@pytest.fixture
def keeping(topology: Topology, peers: Peers) -> Iterator[tuple[dict[Phase, Stage], Trainer]]:
    """A node that has kept the block of a job, which has ended; and the trainer that was given its result."""
    settings = RolloutBrokerSettings(heartbeat_s=0.1, lease_s=600.0, keep="node")
    stages, trainer = {role: peers.stage(role) for role in Phase}, peers.trainer()
    with running(replace(topology, rollout_broker=settings), Journal()):
        for stage in stages.values():
            stage.report()
            assert stage.receive(StageWelcome).keep == "node"
        trainer.ask(Submit("r", "s"), codec.encode(Job(task="math", instance={"n": 1}, job_id="a")))
        stages[Phase.INIT].done(stages[Phase.INIT].receive(StartPhase))
        checksum = zlib.crc32(KEPT_BLOCK)
        handle = BlockHandle(node="local", block_id="b", checksum=checksum, endpoint="tcp://127.0.0.1:1")
        stages[Phase.RUN].done(stages[Phase.RUN].receive(StartPhase), tokens=5, turns=1, kept=handle)
        stages[Phase.EVAL].done(stages[Phase.EVAL].receive(StartPhase), reward=0.5)
        stages[Phase.RUN].report(kept=("b",))
        (result,) = trainer.collect().results
        assert (result.kept, result.tokens, trainer.blocks) == (handle, 5, [])
        yield stages, trainer


def test_a_job_whose_block_is_lost_runs_again_and_is_counted_once(keeping: tuple[dict[Phase, Stage], Trainer]) -> None:
    stages, trainer = keeping
    for _ in range(3):
        stages[Phase.RUN].report(kept=())
    again = stages[Phase.INIT].receive(StartPhase)
    assert (again.job_id, again.attempt) == ("a", 2)
    status = trainer.ask(Status("status"))
    assert (status.lost_blocks, status.uncollected) == (1, 0)
    assert trainer.collect("a", wait_s=0.0).remaining == 1  # what was acknowledged too late changes nothing


def test_a_block_that_a_client_cannot_fetch_comes_by_the_broker(keeping: tuple[dict[Phase, Stage], Trainer]) -> None:
    stages, trainer = keeping
    trainer.ask(RelayBlocks("r", "another session", ("a",)))
    assert len(trainer.collect(wait_s=0.0).results) == 1
    trainer.ask(RelayBlocks("r", "s", ("a", "unknown")))
    assert trainer.collect(wait_s=0.0).results == ()
    assert stages[Phase.RUN].receive(SendBlocks).block_ids == ("b",)
    stages[Phase.RUN].outbox.send_multipart([codec.encode(BlockSent(stage_id="run-1", block_id="b")), KEPT_BLOCK])
    (result,) = trainer.collect().results
    assert (result.kept, trainer.blocks) == (None, [KEPT_BLOCK])
    assert stages[Phase.RUN].receive(ForgetBlocks).block_ids == ("b",)


@pytest.mark.parametrize("frames", [[], [b"too short"], [KEPT_BLOCK[:-1] + b"?"]])
def test_a_node_that_has_no_whole_block_has_lost_it(
    keeping: tuple[dict[Phase, Stage], Trainer], frames: list[bytes]
) -> None:
    stages, trainer = keeping
    trainer.ask(RelayBlocks("r", "s", ("a",)))
    stages[Phase.RUN].receive(SendBlocks)
    sent = BlockSent(stage_id="run-1", block_id="b", lost=not frames)
    stages[Phase.RUN].outbox.send_multipart([codec.encode(sent), *frames])
    assert stages[Phase.INIT].receive(StartPhase).attempt == 2


def big_trajectory(tokens: int) -> TrajectoryBuilder:
    """A trajectory whose values tell where they belong."""
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.USER)
    builder.add_context(np.arange(tokens // 2, dtype=np.int32))
    builder.begin_turn(Role.ASSISTANT)
    ids = np.arange(tokens // 2, dtype=np.int32)
    builder.add_generated(ids, -ids.astype(np.float32), np.full(len(ids), 7, np.int32))
    return builder


def lies_in_its_frame(trajectory: Trajectory) -> bool:
    """Tell by addresses whether all five arrays lie in the memory of one frame of libzmq."""
    owner: Any = trajectory.token_ids
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, memoryview)
    frame = np.frombuffer(owner, np.uint8)
    first, end = frame.ctypes.data, frame.ctypes.data + frame.nbytes
    names = ("token_ids", "loss_mask", "logprobs", "weight_versions", "turns")
    arrays = [getattr(trajectory, name) for name in names]
    inside = all(first <= array.ctypes.data and array.ctypes.data + array.nbytes <= end for array in arrays)
    return isinstance(owner.obj, zmq.Frame) and frame.nbytes == sum(array.nbytes for array in arrays) and inside


@pytest.mark.parametrize("asynchronous", [False, True], ids=["REQ client", "DEALER client"])
def test_arrays_are_views_of_the_received_frame(topology: Topology, peers: Peers, asynchronous: bool) -> None:
    """No copy in Python between the socket and the trainer: the arrays' addresses are the frame's."""
    stages = {role: peers.stage(role) for role in Phase}
    built = big_trajectory(40_000)
    front_door = topology.endpoint(topology.rollout_broker.front_door)
    job = Job(task="math", instance={"n": 1})

    def finish() -> None:
        for role in Phase:
            stages[role].receive(StageWelcome)
        stages[Phase.INIT].done(stages[Phase.INIT].receive(StartPhase))
        run = stages[Phase.RUN].receive(StartPhase)
        stages[Phase.RUN].done(run, built.block().data, tokens=built.tokens, turns=built.turns)
        stages[Phase.EVAL].done(stages[Phase.EVAL].receive(StartPhase), reward=1.0)

    async def collect() -> Trajectory:
        async with AsyncRolloutClient(front_door) as client:
            await client.submit(job)
            finish()
            (trajectory,) = await client.collect(1)
            return trajectory

    with running(topology, Journal()):
        for stage in stages.values():
            stage.report()
        if asynchronous:
            trajectory = asyncio.run(collect())
        else:
            with RolloutClient(front_door) as client:
                client.submit(job)
                finish()
                (trajectory,) = client.collect(1)
    assert lies_in_its_frame(trajectory)
    assert (trajectory.token_ids[20_000:] == np.arange(20_000)).all()
    assert (trajectory.logprobs[20_000:] == -np.arange(20_000)).all()
    assert (trajectory.weight_versions == np.repeat([-1, 7], 20_000)).all()
    assert trajectory.loss_mask.sum() == 20_000
    assert trajectory.turns.tolist() == [[0, 20_000, Role.USER], [20_000, 40_000, Role.ASSISTANT]]


def test_malformed_stage_events_are_dropped(topology: Topology, peers: Peers) -> None:
    with running(topology, Journal()):
        stage = peers.stage(Phase.RUN)
        start = StartPhase(job_id="a", attempt=1, phase=Phase.RUN)
        for frames in ([b""], [b"\xc1"], [b"x", b"y"], [codec.pack({"type": "phase_done"})]):
            stage.outbox.send_multipart(frames)
        wrong: list[dict[str, Any]] = [
            {"stage_id": []},
            {"stage_id": {}},
            {"stage_id": 1},
            {"number": []},
            {"number": 2.5},
        ]
        for fields in wrong:
            stage.outbox.send(codec.pack({"type": "phase_done", "stage_id": "run-1", "number": 1} | fields))
        stage.done(start, tokens=3)  # without its block
        stage.done(start, b"block too short", tokens=3, turns=1)
        stage.done(start, b"block without tokens")
        stage.done(start, tokens=0, turns=2)
        stage.report()
        stage.receive(StageWelcome)
        assert [status.stage_id for status in peers.trainer().ask(Status("r")).stages] == ["run-1"]


def test_a_stage_process_may_not_announce_a_hosts_name(topology: Topology, peers: Peers) -> None:
    """Looking it up held up all sockets of the broker."""
    with running(topology, Journal()):
        named, stage = peers.stage(Phase.INIT), peers.stage(Phase.RUN)
        named.endpoint = "tcp://host.invalid:5555"
        named.report()
        stage.report()
        stage.receive(StageWelcome)
        assert [status.stage_id for status in peers.trainer().ask(Status("r")).stages] == ["run-1"]


class FullJournal(Journal):
    """Its disk is full for a while once it has taken a job."""

    is_full = False

    def write(self, *changes: Any) -> None:
        if self.is_full:
            raise JournalFailed("the disk is full")
        super().write(*changes)


def test_a_full_disk_costs_no_job_an_attempt(topology: Topology, peers: Peers) -> None:
    """What could not be sent was lost after a lease, again and again."""
    settings = RolloutBrokerSettings(heartbeat_s=0.1, lease_s=0.5)
    journal = FullJournal()
    with running(replace(topology, rollout_broker=settings), journal):
        stage, trainer = peers.stage(Phase.INIT), peers.trainer()
        stage.report()
        stage.receive(StageWelcome)
        journal.is_full = True
        trainer.ask(Submit("r", "s"), codec.encode(Job(task="math", instance={"n": 1}, job_id="a", max_attempts=1)))
        for _ in range(12):
            stage.report()
            time.sleep(0.1)
        journal.is_full = False
        assert stage.receive(StartPhase).attempt == 1
        stage.report(a=1)
        status = trainer.ask(Status("status"))
        assert (status.redelivered, status.running["init"]) == (0, 1)


@pytest.mark.parametrize("theirs", [PROTOCOL_VERSION + 1, UNSAID_PROTOCOL], ids=["newer", "not named"])
def test_a_stage_process_of_another_version_is_refused_by_name(topology: Topology, peers: Peers, theirs: int) -> None:
    with running(topology, Journal()):
        stage = peers.stage(Phase.INIT)
        stage.report(protocol=theirs)
        error = stage.receive(StageRefused).error
        assert (error.code, error.fields) == (
            "version_mismatch",
            {"ours": PROTOCOL_VERSION, "theirs": theirs},
        )
        assert peers.trainer().ask(Status("r")).stages == ()


@pytest.mark.parametrize("named", [{"protocol": PROTOCOL_VERSION + 1}, {}], ids=["named", "not named"])
def test_a_report_of_another_version_that_cannot_be_read_is_answered(
    topology: Topology, peers: Peers, named: dict[str, int]
) -> None:
    with running(topology, Journal()):
        stage = peers.stage(Phase.INIT)
        content = {"type": "stage_report", "stage_id": "init-1", "role": "init", **named}
        where = {"node": "local", "endpoint": stage.endpoint, "slots": {"of": "another kind"}, "tasks": [], "new": 1}
        stage.outbox.send(codec.pack({**content, **where}))
        assert stage.receive(StageRefused).error.fields["theirs"] == named.get("protocol", UNSAID_PROTOCOL)


def test_a_node_of_another_version_of_the_package_is_warned_of(
    topology: Topology, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    with running(topology, Journal()):
        stage = peers.stage(Phase.INIT)
        stage.report(facts=NodeFacts(host="h", version="9.9"))
        assert stage.receive(StageWelcome)
    assert "node local has prorl-zmq 9.9, and this broker" in caplog.text


def test_a_broker_that_cannot_bind_leaves_nothing_open() -> None:
    topology = Topology(rollout_broker=RolloutBrokerSettings(front_door="tcp://192.0.2.1:5555"))
    with pytest.raises(InvalidEndpoint):
        RolloutBroker(topology, Journal())


def test_stage_events_that_once_ended_the_broker(topology: Topology, peers: Peers) -> None:
    """Field names that no Struct can have, phase data too deep to be sent on, a reward that is not a number."""
    trainer = peers.trainer()
    stages = {role: peers.stage(role) for role in Phase}
    nested: dict[str, Any] = {}
    for _ in range(900):
        nested = {"a": nested}
    with running(topology, Journal()):
        for stage in stages.values():
            stage.report()
            stage.receive(StageWelcome)
        odd = {
            "type": "stage_report",
            "protocol": PROTOCOL_VERSION,
            "stage_id": "odd",
            "role": "run",
            "node": "local",
            "slots": 1,
            "welcomed": True,
        }
        odd |= {"endpoint": stages[Phase.RUN].endpoint, "tasks": [{"name": "odd", "fields": {'a"b': "str"}}]}
        stages[Phase.RUN].outbox.send(codec.pack(odd))
        assert isinstance(trainer.ask(Submit("r", "s"), codec.encode(Job(task="math", instance={"n": 1}))), Accepted)
        init = stages[Phase.INIT].receive(StartPhase)
        deep = {"type": "phase_done", "stage_id": "init-1", "job_id": init.job_id, "attempt": 1, "phase": "init"}
        stages[Phase.INIT].outbox.send(codec.pack(deep | {"phase_data": nested}))
        stages[Phase.EVAL].done(init, reward=float("nan"))
        assert trainer.ask(Status("status")).tasks == ("math",)


def test_a_broker_that_has_read_exactly_one_batch_goes_on_judging(
    topology: Topology, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.brokers.rollout.rollout_broker.BATCH", 1)
    settings = replace(topology.rollout_broker, heartbeat_s=0.1, lease_s=0.3)
    with running(replace(topology, rollout_broker=settings), Journal()):
        peers.stage(Phase.RUN).report()
        trainer = peers.trainer()
        deadline = time.monotonic() + WAIT_MS / 1000
        while trainer.ask(Status("joined")).stages == ():
            assert time.monotonic() < deadline, "it does not join"
        while trainer.ask(Status("silent")).stages != ():
            assert time.monotonic() < deadline, "its lease does not end"


class Walk:
    """The rooms that a broker's thread passes from the end of a RUN until everything that follows from it is sent."""

    def __init__(self) -> None:
        self.rooms = ["brokers.rollout"]
        self.returns = 0
        """How often a call led back to a room that was passed before."""
        self._on = False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        if frame.f_code.co_name == "_handle_event":
            done = frame.f_locals["event"]
            self._on = isinstance(done, PhaseDone) and done.phase == Phase.RUN
        elif frame.f_code.co_name == "answer_held":
            self._on = False
        caller, called = (str(one.f_globals.get("__name__")).split(".") for one in (frame.f_back, frame))
        if not self._on or {caller[0], called[0]} != {"prorl_zmq"}:
            return
        before, now = (".".join(name[1:-1][: 2 if name[1] == "brokers" else 1]) for name in (caller, called))
        self.returns += before != now and now in self.rooms
        if now not in self.rooms:
            self.rooms.append(now)


def test_the_end_of_a_phase_passes_few_rooms(topology: Topology, peers: Peers) -> None:
    walk, built = Walk(), five_tokens()
    threading.setprofile(walk.profile)
    try:
        with running(topology, Journal()):
            stages = {role: peers.stage(role) for role in Phase}
            for stage in stages.values():
                stage.report()
                stage.receive(StageWelcome)
            job = Job(task="math", instance={"n": 1}, job_id="a")
            assert isinstance(peers.trainer().ask(Submit("r", "s"), codec.encode(job)), Accepted)
            stages[Phase.INIT].done(stages[Phase.INIT].receive(StartPhase))
            stages[Phase.RUN].done(stages[Phase.RUN].receive(StartPhase), built.block().data, tokens=5, turns=1)
            stages[Phase.EVAL].receive(StartPhase)
    finally:
        threading.setprofile(None)
    assert {"brokers.rollout", "brokers.journal", "wire"} <= set(walk.rooms)
    assert len(walk.rooms) <= 8
    assert walk.returns <= 10
