"""The fuzz target of bench/fuzz.py, one process: `python fuzz_target.py [LIBFUZZER FLAGS] CORPUS`.

The first byte of an input says what is tried: the decoder with each union of messages, as the sockets use it, or a
front door with a real job table, outbox, catalogue and journal behind it, and no sockets. The front door is a new one
every so many requests; between them its state piles up, since requests meet what others left. Only the errors that the
protocol names may come out: anything else, an `internal_error` in an answer among it, is a crash.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atheris

with atheris.instrument_imports(include=["prorl_zmq"]):
    from prorl_zmq import codec
    from prorl_zmq.brokers.actions import End
    from prorl_zmq.brokers.front_door import FrontDoor
    from prorl_zmq.brokers.job_history import JobHistory
    from prorl_zmq.brokers.job_table import JobTable
    from prorl_zmq.brokers.journal import MemoryJournal
    from prorl_zmq.brokers.outbox import Outbox
    from prorl_zmq.brokers.quota import Quota
    from prorl_zmq.brokers.task_catalog import TaskCatalog
    from prorl_zmq.brokers.write_ahead import WriteAhead
    from prorl_zmq.config import RolloutBrokerSettings
    from prorl_zmq.errors import InternalError, MalformedMessage

from prorl_zmq.messages import (
    AddBackend,
    AnyBackendReply,
    AnyBackendRequest,
    AnyEngineReply,
    AnyEngineRequest,
    Assign,
    Backend,
    Cancel,
    Collect,
    FrontDoorReply,
    FrontDoorRequest,
    Generate,
    Hello,
    Job,
    Outcome,
    Phase,
    PhaseDone,
    PhaseFailed,
    Refused,
    Result,
    Sampling,
    StageCommand,
    StageEvent,
    StageReport,
    StartPhase,
    Status,
    Submit,
    Task,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq.brokers.actions import Action

UNIONS: list[Any] = [
    *(FrontDoorRequest, FrontDoorReply, StageEvent, StageCommand),
    *(AnyBackendRequest, AnyBackendReply, AnyEngineRequest, AnyEngineReply, Job),
]
DOOR = len(UNIONS)
"""First byte of an input that goes to the front door."""
RENEW = 5000
"""Inputs that one front door gets."""
SMALL = RolloutBrokerSettings(max_jobs=50, job_limit_bytes=4096)
TASK = Task("math", {"problem": "str", "ground_truth": "str"})


class Door:
    """A front door, and what is behind it."""

    def __init__(self) -> None:
        self._quota = Quota(SMALL.max_jobs, SMALL.max_held_bytes, 1.0)
        self._table = JobTable(SMALL.lease_s, SMALL.ready_limit, SMALL.heartbeat_s)
        outbox = Outbox()
        self._history = JobHistory()
        self._writes = WriteAhead(MemoryJournal(), self._table, outbox, self._history, lambda _: None)
        catalog = TaskCatalog()
        catalog.add((TASK,))
        place = {"stage_id": "i", "role": Phase.INIT, "node": "n", "slots": 4, "endpoint": "e"}
        report = StageReport(**place, tasks=(TASK,), welcomed=True)
        self._now = 0.0
        self._perform(self._table.stage_reported(report, self._now))
        self._door = FrontDoor(
            SMALL,
            "ipc:///broker",
            self._table,
            outbox,
            self._history,
            catalog,
            self._quota,
            self._writes,
            self._perform,
            self._reply,
            self._now,
        )

    def handle(self, frames: list[bytes]) -> None:
        """Give it a request, and some time."""
        self._now += 0.01
        self._door.handle(frames, self._now)
        self._perform(self._table.tick(self._now))
        self._writes.settle(self._now)
        self._door.answer_held(self._writes.take_news(), self._now)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._history.note(action, self._now)
            if isinstance(action, End):
                self._quota.ended(action.finished)
        self._writes.perform(actions)

    def _reply(self, frames: Sequence[Any]) -> bool:
        reply = codec.decode(
            bytes(frames[-1] if len(frames) == 1 else frames[list(frames).index(b"") + 1]), FrontDoorReply
        )
        if isinstance(reply, Refused) and reply.error.code == InternalError.code:
            raise AssertionError(reply.error.message)
        return True


door = Door()
inputs = 0


def test_one_input(data: bytes) -> None:
    """Try one input."""
    global door, inputs  # noqa: PLW0603 - libFuzzer calls a function
    inputs += 1
    if inputs % RENEW == 0:
        door = Door()
    if not data:
        return
    if data[0] < DOOR:
        with contextlib.suppress(MalformedMessage):
            codec.decode(data[1:], UNIONS[data[0]])
        return
    door.handle([b"client", *split(data[1:])])


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
    done = PhaseDone(stage_id="i", job_id="one", attempt=1, phase=Phase.INIT, carry={"a": [1, {"b": 2.0}]})
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
    return [*decoded, *(bytes([DOOR]) + join([b"", *frames]) for frames in requests)]


def main() -> None:
    logging.disable()
    corpus = Path(sys.argv[-1])
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, test_one_input)
    page = os.sysconf("SC_PAGE_SIZE")
    for seed in seeds():
        test_one_input(seed)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    print(f"resident before: {resident}", file=sys.stderr, flush=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
