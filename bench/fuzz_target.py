"""The fuzz target of bench/fuzz.py, one process: `python fuzz_target.py [LIBFUZZER FLAGS] CORPUS`.

The first byte of an input selects the test: the decoder with each union of messages, as the sockets use it; a front
door with a real job table, outbox, catalogue and journal behind it, and no sockets; or a valid message with some fields
replaced by values of wrong types and sizes, which goes to the receiver of its kind: the front door, or the socket that
a whole rollout broker takes stage events from. Front door and broker are replaced at intervals; in between their state
accumulates, since messages meet the effects of others. Only the errors that the protocol names are allowed: anything
else, including an `internal_error` in an answer and a traceback in the log, is a crash.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import atheris
import msgspec
import zmq

with atheris.instrument_imports(include=["prorl_zmq"]):
    from prorl_zmq.brokers.journal.journal import Journal
    from prorl_zmq.brokers.rollout.action_queue import perform_queue
    from prorl_zmq.brokers.rollout.batch_runner import BatchRunner
    from prorl_zmq.brokers.rollout.front_door import FrontDoor
    from prorl_zmq.brokers.rollout.job_table import JobTable
    from prorl_zmq.brokers.rollout.jobs import Jobs
    from prorl_zmq.brokers.rollout.kept_blocks import KeptBlocks
    from prorl_zmq.brokers.rollout.quota import Quota
    from prorl_zmq.brokers.rollout.result_store import ResultStore
    from prorl_zmq.brokers.rollout.rollout_broker import RolloutBroker
    from prorl_zmq.brokers.rollout.sized_cache import SizedCache
    from prorl_zmq.brokers.rollout.task_catalog import TaskCatalog
    from prorl_zmq.brokers.rollout.transition_log import TransitionLog
    from prorl_zmq.brokers.rollout.write_ahead import WriteAhead
    from prorl_zmq.config import RolloutBrokerSettings, ServiceSettings, Topology
    from prorl_zmq.errors import InternalError, MalformedMessage
    from prorl_zmq.wire import codec
    from prorl_zmq.wire.sockets import open_socket

from prorl_zmq.wire.messages.backends import (
    AddBackend,
    AnyBackendReply,
    AnyBackendRequest,
    Assign,
    Backend,
    BackendAlive,
    ListBackends,
    OwnerAlive,
    Release,
)
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION, Refused
from prorl_zmq.wire.messages.batches import BatchOptions, CloseBatch, Feed, NextGroup, OpenBatch, SessionAlive
from prorl_zmq.wire.messages.engines import AnyEngineReply, AnyEngineRequest, Generate, WeightUpdate
from prorl_zmq.wire.messages.front_door import (
    Cancel,
    Collect,
    FrontDoorReply,
    FrontDoorRequest,
    Hello,
    ListNodes,
    RelayBlocks,
    Status,
    Submit,
    Trace,
)
from prorl_zmq.wire.messages.jobs import Job, Outcome, Phase, Result, Sampling
from prorl_zmq.wire.messages.nodes import NodeFacts
from prorl_zmq.wire.messages.stages import (
    BlockSent,
    EventsNoted,
    MemberAlive,
    PhaseDone,
    PhaseFailed,
    ShowTurns,
    StageCommand,
    StageEvent,
    StageLeaving,
    StageReport,
    StartPhase,
    StopPhase,
    Task,
    TurnsShown,
)
from prorl_zmq.wire.messages.watching import ListSteps, Peek, PeekTurns, TurnsSoFar, ViewBatch, Watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq.brokers.rollout.actions import Action

UNIONS: list[Any] = [
    *(FrontDoorRequest, FrontDoorReply, StageEvent, StageCommand),
    *(AnyBackendRequest, AnyBackendReply, AnyEngineRequest, AnyEngineReply, Job),
]
DOOR = len(UNIONS)
"""First byte of an input that goes to the front door."""
MUTATED = DOOR + 1
"""First byte of an input that says which message to spoil, and how."""
RENEW = 5000
"""Inputs that one front door, or one broker, gets."""
WAIT_MS = 5000
WILD: list[Any] = [
    *([], {}, None, True, -1, 0, 1, 2**31, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf")),
    *("", "x" * 300, "\x1b[2J\n", "a/../b", b"\xff", [[]], {"a": 1}, {"a": [{}]}, ["a"], "i", "one"),
]
"""What fields are replaced by."""
SMALL = RolloutBrokerSettings(max_jobs=50, job_limit_bytes=4096)
TASK = Task("math", {"problem": "str", "ground_truth": "str"})


class Door:
    """A front door, and what is behind it."""

    def __init__(self) -> None:
        table, results, history = (
            JobTable(SMALL.lease_s, SMALL.ready_limit, SMALL.heartbeat_s),
            ResultStore(),
            TransitionLog(),
        )
        self._writes = WriteAhead(Journal(), table, results, history, lambda _: None)
        quota = Quota(SMALL.max_jobs, SMALL.max_held_bytes, 1.0)
        self._jobs = Jobs(table, results, history, quota, self._writes, KeptBlocks(SMALL.lease_s), SizedCache(2**20))
        catalog = TaskCatalog()
        catalog.add((TASK,))
        place = {"stage_id": "i", "role": Phase.INIT, "node": "n", "slots": 4, "endpoint": "e"}
        report = StageReport(**place, tasks=(TASK,), welcomed=True)
        self._now = 0.0
        self._batches = BatchRunner(self._jobs, catalog, SMALL.job_limit_bytes)
        self._perform(table.stage_reported(report, self._now))
        self._door = FrontDoor(
            SMALL,
            "ipc:///broker",
            self._jobs,
            catalog,
            self._batches,
            self._reply,
            lambda sender: sender,
            lambda *_: None,
            started_at=self._now,
        )

    def handle(self, frames: list[bytes]) -> None:
        """Give it a request, and some time."""
        self._now += 0.01
        self._door.handle(frames, self._now)
        self._perform(self._jobs.table.tick(self._now))
        self._batches.tick(self._now)
        self._batches.launch(self._now)
        self._perform(())
        self._writes.settle(self._now)
        self._door.answer_held(self._writes.take_news(), self._now)

    def _perform(self, actions: Sequence[Action]) -> None:
        self._jobs.queue.extend(actions)
        perform_queue(self._jobs, self._batches, self._now, self._now)

    def _reply(self, frames: Sequence[Any]) -> bool:
        reply = codec.decode(
            bytes(frames[-1] if len(frames) == 1 else frames[list(frames).index(b"") + 1]), FrontDoorReply
        )
        if isinstance(reply, Refused) and reply.error.code == InternalError.code:
            raise AssertionError(reply.error.message)
        return True


class EventsDoor:
    """A rollout broker that is not running: each event goes through its socket, and is taken from there at once."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="prorl-fuzz-")
        Path(self._folder.name).chmod(0o700)
        topology = Topology(service=ServiceSettings(run_dir=self._folder.name), rollout_broker=SMALL)
        self._broker = RolloutBroker(topology, Journal())
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.PUSH)
        self._socket.connect(self._broker.stage_events)
        self.handle(REPORT)

    def handle(self, content: dict[str, Any]) -> None:
        """Have the broker take an event, and do what follows from it."""
        broker = self._broker
        self._socket.send(codec.pack(content))
        if not broker._events.poll(WAIT_MS):
            raise AssertionError("an event did not arrive")
        broker._drain_events()
        broker._housekeep()

    def close(self) -> None:
        """Close the broker and its folder."""
        self._socket.close(0)
        self._context.term()
        self._broker.stop()
        self._broker.run()  # which closes its sockets
        self._folder.cleanup()


class Tracebacks(logging.Handler):
    """Makes a crash of what a broker survives and logs."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise what was raised."""
        if record.exc_info and record.exc_info[1] is not None:
            raise record.exc_info[1]


door = Door()
events_door: EventsDoor | None = None
inputs = 0


def test_one_input(data: bytes) -> None:
    """Try one input."""
    global door, events_door, inputs  # noqa: PLW0603 - libFuzzer calls a function
    inputs += 1
    if inputs % RENEW == 0:
        door = Door()
        if events_door is not None:
            events_door.close()
            events_door = None
    if not data:
        return
    if data[0] < DOOR:
        with contextlib.suppress(MalformedMessage):
            codec.decode(data[1:], UNIONS[data[0]])
        return
    if data[0] == DOOR:
        door.handle([b"client", *split(data[1:])])
        return
    kind, content = spoilt(data[1:])
    if kind in get_args(StageEvent):
        events_door = events_door or EventsDoor()
        events_door.handle(content)
    elif kind in get_args(FrontDoorRequest):
        frames = [codec.pack(JOB)] if kind in (Submit, Feed) else []
        door.handle([b"client", b"", codec.pack(content), *frames])
    else:
        with contextlib.suppress(MalformedMessage):
            codec.convert(content, kind)


def spoilt(data: bytes) -> tuple[type[msgspec.Struct], dict[str, Any]]:
    """Give a message's kind and content: the first byte chooses it, and each two more replace one field by a value."""
    message = TEMPLATES[(data[0] if data else 0) % len(TEMPLATES)]
    content = msgspec.to_builtins(message, builtin_types=(bytes,))
    names = [*message.__struct_fields__, "type"]
    for place, value in zip(data[1::2], data[2::2], strict=False):
        content[names[place % len(names)]] = WILD[value % len(WILD)]
    return type(message), content


def split(data: bytes) -> list[bytes]:
    """Cut an input into frames: each is two bytes of length, and so much."""
    frames = []
    while len(data) >= 2:
        size = int.from_bytes(data[:2], "big")
        frames.append(data[2 : 2 + size])
        data = data[2 + size :]
    return frames


def join(frames: Sequence[bytes]) -> bytes:
    """Undo `split`."""
    return b"".join(len(frame).to_bytes(2, "big") + frame for frame in frames)


JOB = msgspec.to_builtins(Job(task="math", instance={"problem": "1+1?", "ground_truth": "2"}, job_id="one"))
BY_STAGE: dict[str, Any] = {"stage_id": "i", "job_id": "one", "attempt": 1, "number": 1}
ON_STAGE: dict[str, Any] = {"job_id": "one", "attempt": 1}
REPORT_OF_I = StageReport(
    protocol=PROTOCOL_VERSION,
    stage_id="i",
    role=Phase.INIT,
    node="n",
    slots=4,
    endpoint="ipc:///nowhere/prorl-fuzz",
    tasks=(TASK,),
    welcomed=True,
    running={"one": 1},
)
REPORT_OF_NODE = msgspec.structs.replace(
    REPORT_OF_I, member="m", number=1, kept=("one",), facts=NodeFacts(host="h", version="1", memory_total_bytes=1)
)
REPORT = msgspec.to_builtins(REPORT_OF_I)
TEMPLATES: list[Any] = [
    REPORT_OF_I,
    REPORT_OF_NODE,
    MemberAlive(member="m", number=1, began={"i": {"one": 1}}, backends={"one": (1, "b")}),
    StageLeaving("i"),
    TurnsShown(stage_id="i", job_id="one", attempt=1, so_far=TurnsSoFar(shown_turns=1, shown_tokens=1)),
    *(BlockSent(stage_id="i", block_id="one", lost=lost) for lost in (False, True)),
    *(PhaseDone(**BY_STAGE, phase=phase, reward=1.0, phase_data={"a": 1}) for phase in Phase),
    *(
        PhaseFailed(**BY_STAGE, phase=phase, outcome=Outcome.FAILED, error=InternalError("x").info(), retry=retry)
        for phase in Phase
        for retry in (False, True)
    ),
    *(Hello("r"), Submit("r", "s"), Collect("r", "s", "c", ("one",)), Cancel("r", ("one",)), Status("r")),
    OpenBatch("r", "s", "batch", BatchOptions(target_groups=1, group_size=2)),
    Feed("r", "s", "batch", 0),
    NextGroup("r", "s", "batch", "c", ("a.1",), feeds=True),
    CloseBatch("r", "s", "batch"),
    *(SessionAlive("r", "s"), WeightUpdate("r", "set", 3), RelayBlocks("r", "s", ("one",)), ListNodes("r")),
    *(Watch("r", since=1), Peek("r", "one"), PeekTurns("r", "one"), ViewBatch("r", "batch"), ListSteps("r")),
    *(
        Trace("r", "one"),
        StartPhase(**ON_STAGE, phase=Phase.RUN),
        StopPhase(**ON_STAGE),
        ShowTurns(**ON_STAGE),
        EventsNoted((1,)),
    ),
    *(Assign("r", owner="o", **ON_STAGE, wait_s=1.0), Release("r", **ON_STAGE), OwnerAlive("r", "o")),
    *(AddBackend("r", Backend(backend_id="b", endpoint="ipc:///b")), BackendAlive("r", "b", 1), ListBackends("r")),
]


def seeds() -> list[bytes]:
    """Give the inputs to start from: a message of each kind."""
    job = Job(task="math", instance={"problem": "1+1?", "ground_truth": "2"}, job_id="one")
    packed = codec.encode(job)
    requests = [
        [codec.encode(Hello("r"))],
        [codec.encode(Submit("r", "s")), packed],
        [codec.encode(Submit("r", "s")), packed, codec.encode(Job(task="other", instance={}, job_id="two"))],
        [codec.encode(Collect("r", "s", "c", ("one",), wait_s=1.0))],
        [codec.encode(Collect("r", "s", "c", goodbye=True))],
        [codec.encode(Cancel("r", ("one", "two")))],
        [codec.encode(Status("r"))],
    ]
    done = PhaseDone(stage_id="i", job_id="one", attempt=1, phase=Phase.INIT, phase_data={"a": [1, {"b": 2.0}]})
    error = InternalError("x").info()
    failed = PhaseFailed(
        stage_id="i", job_id="one", attempt=1, phase=Phase.RUN, outcome=Outcome.FAILED, error=error, metrics={"a": 1.0}
    )
    backend = AddBackend("r", Backend(backend_id="b", endpoint="ipc:///b"))
    assign = Assign("r", owner="o", job_id="one", attempt=1, wait_s=1.0)
    messages: list[tuple[int, Any]] = [
        *((0, message) for message in (Hello("r"), Submit("r", "s"), Collect("r", "s", "c"), Status("r"))),
        *((1, Refused("r", error)),),
        *((2, message) for message in (done, failed)),
        *((3, message) for message in (StartPhase(job_id="one", attempt=1, phase=Phase.RUN),)),
        *((4, message) for message in (assign, backend)),
        (6, Generate("r", job_id="one", sampling=Sampling())),
        (8, job),
        (8, Result(job_id="one", task="math", outcome=Outcome.COMPLETED, reward=1.0)),
    ]
    decoded = [bytes([union]) + codec.encode(message) for union, message in messages]
    spoiling = [bytes([MUTATED, number]) for number in range(len(TEMPLATES))]
    return [*decoded, *spoiling, *(bytes([DOOR]) + join([b"", *frames]) for frames in requests)]


def resident_bytes() -> int:
    """Give this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def replay(corpus: Path, runs: int) -> None:
    """Give what was kept again and again, without the fuzzer and its tables, and say how memory has grown."""
    kept = [path.read_bytes() for path in sorted(corpus.iterdir())]
    for data in kept:
        test_one_input(data)
    before = resident_bytes()
    for _, data in zip(range(runs), itertools.cycle(kept), strict=False):
        test_one_input(data)
    print(f"grown: {resident_bytes() - before}", file=sys.stderr, flush=True)


def main() -> None:
    logging.disable(logging.WARNING)
    logging.getLogger("prorl").addHandler(Tracebacks())
    logging.getLogger("prorl").propagate = False
    corpus = Path(sys.argv[-1])
    if sys.argv[1] == "replay":
        replay(corpus, int(sys.argv[2]))
        return
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, test_one_input)
    for seed in seeds():
        test_one_input(seed)
    print(f"resident before: {resident_bytes()}", file=sys.stderr, flush=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
