"""Nothing leaves before it is in the journal, and nothing is lost while the journal cannot be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.journal.records import Finished, JobState, StoredBlock, Submission
from prorl_zmq.brokers.rollout.actions import Action, Close, Start, Stop
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.brokers.rollout.result_store import ResultStore
from prorl_zmq.brokers.rollout.stage_pool import SlotClaim
from prorl_zmq.brokers.rollout.transition_log import TransitionLog
from prorl_zmq.brokers.rollout.write_ahead import FIRST_PAUSE_S, MAX_PAUSE_S, WriteAhead
from prorl_zmq.errors import JournalFailed
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Job, Phase, SandboxHandle
from prorl_zmq.wire.messages.stages import PhaseDone, StageReport, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Disk(Journal):
    """A journal whose disk can fail, or take no more than so many results at once."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.room = 1000
        self._kept: set[int] = set()
        """The numbers of the results."""
        self.writes = 0

    def accept(
        self, jobs: Sequence[JobState], submission: Submission | None = None, replaced: Sequence[int] = ()
    ) -> None:
        self._check(0)
        super().accept(jobs, submission, replaced)

    def write(
        self,
        states: Sequence[JobState],
        ended: Sequence[Finished],
        acknowledged: Sequence[int],
        discarded: Sequence[int] = (),
        notes: Mapping[str, bytes | None] | None = None,
    ) -> None:
        kept = {*self._kept, *(one.sequence for one in ended)}.difference(acknowledged)
        self._check(len(kept))
        self._kept = kept
        self.writes += 1
        super().write(states, ended, acknowledged, discarded, notes)

    def unloaded(self, one: Any) -> Any:
        return one._replace(block=StoredBlock(one.sequence, len(one.block)))

    def _check(self, results: int) -> None:
        if self.fails or results > self.room:
            raise JournalFailed("the disk is full", path="/journal")


class Broker:
    """A table and an outbox behind a journal that may fail."""

    def __init__(self, memory_limit_bytes: int = 1000) -> None:
        self.disk = Disk()
        self.table = JobTable(10.0, 100, 2.5)
        self.results = ResultStore()
        self.sent: list[Any] = []
        history = TransitionLog()
        self.writes = WriteAhead(self.disk, self.table, self.results, history, self.sent.append, memory_limit_bytes)
        self.now = 0.0
        for role in Phase:
            report = StageReport(
                stage_id=f"{role}-1", role=role, node="local", slots=8, endpoint="ipc://stage", tasks=(Task("math"),)
            )
            self.perform(self.table.stage_reported(report, self.now))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            self.writes.perform(action)

    def submit(self, job_id: str, **more: Any) -> None:
        job = Job(task="math", instance={}, job_id=job_id, **more)
        packed = codec.encode(job)
        state = JobState(self.table.last_sequence + 1, "s", job_id, "math", 60.0, packed)
        self.writes.accept([state], self.now)
        self.perform(self.table.submit("s", job, packed, self.now))

    def done(self, phase: Phase, job_id: str, **more: Any) -> None:
        block = b"block" if phase == Phase.RUN else None
        tokens = 1 if block else 0
        event = PhaseDone(stage_id=f"{phase}-1", job_id=job_id, attempt=1, phase=phase, tokens=tokens, **more)
        self.perform(self.table.phase_done(event, block, self.now))

    def finish(self, job_id: str) -> None:
        self.submit(job_id)
        self.done(Phase.INIT, job_id)
        self.done(Phase.RUN, job_id)
        self.done(Phase.EVAL, job_id, reward=1.0)

    def collect(self) -> list[str]:
        return [one.result.job_id for one in self.results.take("s", "client", 100, self.now)]

    def starts(self) -> list[tuple[str, Phase]]:
        sent, self.sent[:] = list(self.sent), []
        return [(one.command.job_id, one.command.phase) for one in sent if isinstance(one, Start)]


def test_a_phase_is_started_after_its_hold_is_written_down() -> None:
    broker = Broker()
    broker.submit("a")
    assert broker.starts() == []
    broker.writes.settle(0.0)
    (kept,) = broker.disk.recover().unfinished
    assert (kept.job_id, kept.phase, kept.stage_id, kept.attempt) == ("a", Phase.INIT, "init-1", 1)
    assert broker.starts() == [("a", Phase.INIT)]


def test_many_changes_of_a_round_are_one_write() -> None:
    broker = Broker()
    broker.finish("a")
    broker.finish("b")
    before = broker.disk.writes
    broker.writes.settle(0.0)
    assert broker.disk.writes == before + 1
    assert broker.collect() == ["a", "b"]
    assert broker.writes.take_news() == {"s"}
    assert broker.writes.take_news() == set()


def test_a_result_is_given_after_it_is_written_down_and_counts_before() -> None:
    broker = Broker()
    broker.finish("a")
    assert (broker.collect(), broker.results.waiting("s"), len(broker.results)) == ([], 1, 1)
    assert broker.results.acknowledge("s", ["a"]) == []  # nobody can have it yet
    broker.writes.settle(0.0)
    assert broker.collect() == ["a"]


def test_while_the_disk_fails_nothing_is_sent_and_nothing_is_lost() -> None:
    broker = Broker()
    broker.submit("a")
    broker.writes.settle(0.0)
    broker.starts()
    broker.disk.fails = True
    replies: list[str] = []
    broker.done(Phase.INIT, "a")
    broker.writes.then(lambda: replies.append("told"))
    broker.writes.settle(0.0)
    assert (broker.starts(), replies) == ([], [])
    assert broker.writes.retry_at == FIRST_PAUSE_S
    with pytest.raises(JournalFailed, match="the disk is full; no new jobs are taken until then") as caught:
        broker.submit("b")
    assert (caught.value.path, caught.value.retry_after_s) == ("/journal", MAX_PAUSE_S)
    assert "b" not in broker.table
    for _ in range(10):
        broker.now = broker.writes.retry_at
        broker.writes.settle(broker.now)
    assert broker.writes.retry_at - broker.now == MAX_PAUSE_S
    broker.disk.fails = False
    broker.writes.settle(broker.now)  # too early
    assert broker.starts() == []
    broker.writes.settle(broker.writes.retry_at)
    assert (broker.starts(), replies, broker.writes.retry_at) == ([("a", Phase.RUN)], ["told"], None)
    broker.submit("b")


def test_the_same_stop_is_not_kept_twice_while_the_disk_fails() -> None:
    broker = Broker()
    broker.disk.fails = True
    broker.now = 1.0
    broker.perform([Stop("init-1", SlotClaim("x", 1))] * 3)
    broker.perform([Close(SandboxHandle("process", "/x"))])
    broker.disk.fails = False
    broker.writes.settle(broker.now)
    assert broker.sent == [Stop("init-1", SlotClaim("x", 1)), Close(SandboxHandle("process", "/x"))]


def test_results_that_fit_are_given_though_not_all_do() -> None:
    """Else a full journal would stay so: clients cannot collect what they are not told of."""
    broker = Broker()
    for job_id in "abc":
        broker.submit(job_id)
    broker.writes.settle(0.0)
    broker.disk.room = 2
    for job_id in "abc":
        broker.done(Phase.INIT, job_id)
        broker.done(Phase.RUN, job_id)
        broker.done(Phase.EVAL, job_id, reward=1.0)
    broker.writes.settle(0.0)
    assert broker.collect() == []
    broker.writes.settle(broker.writes.retry_at)
    assert broker.collect() == ["a", "b"]
    broker.writes.acknowledge(broker.results.acknowledge("s", ["a"]))
    broker.writes.settle(100.0)
    assert broker.collect() == ["b", "c"]
    assert broker.writes.retry_at is None


def test_new_jobs_are_refused_for_lack_of_room_without_holding_up_the_others() -> None:
    broker = Broker()
    broker.submit("a")
    broker.writes.settle(0.0)
    broker.starts()
    broker.disk.fails = True
    with pytest.raises(JournalFailed):
        broker.submit("b")
    broker.disk.fails = False
    broker.done(Phase.INIT, "a")
    broker.writes.settle(0.0)
    assert broker.starts() == [("a", Phase.RUN)]


def test_an_acknowledged_result_is_gone_before_its_id_comes_again() -> None:
    broker = Broker()
    broker.finish("a")
    broker.writes.settle(0.0)
    broker.writes.acknowledge(broker.results.acknowledge("s", broker.collect()))
    broker.submit("a")
    kept = broker.disk.recover()
    assert (len(kept.unfinished), kept.uncollected) == (1, [])


def test_blocks_beyond_the_memory_limit_stay_in_the_journal() -> None:
    broker = Broker(memory_limit_bytes=12)
    for job_id in "abcd":
        broker.finish(job_id)
        broker.writes.settle(0.0)
    kinds = [type(broker.results.get(job_id).block) for job_id in "abcd"]
    assert kinds == [bytes, bytes, StoredBlock, StoredBlock]
    assert broker.results.memory_bytes == 10
    broker.results.acknowledge("s", broker.collect())
    assert broker.results.memory_bytes == 0


def test_a_trajectory_that_waits_for_its_teacher_stays_in_the_journal() -> None:
    broker = Broker()
    broker.submit("a", teacher="teacher")
    broker.done(Phase.INIT, "a")
    broker.done(Phase.RUN, "a", chat=ChatSettings())
    broker.writes.settle(0.0)
    assert broker.table.records["a"].block == b"block", "EVAL's slots bound the number of these"
    broker.done(Phase.EVAL, "a", reward=1.0)
    broker.writes.settle(0.0)
    assert broker.table.records["a"].block == StoredBlock(1, 5)
    broker.done(Phase.SCORE, "a")
    broker.writes.settle(0.0)
    assert broker.results.get("a").block == StoredBlock(1, 5)
    assert broker.results.memory_bytes == 0


def test_fault_of_ours_is_treated_as_a_failing_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    broker.submit("a")
    with monkeypatch.context() as patch:
        patch.setattr(broker.disk, "write", lambda *_: 1 / 0)
        broker.writes.settle(0.0)
    assert broker.starts() == []
    broker.writes.settle(broker.writes.retry_at)
    assert broker.starts() == [("a", Phase.INIT)]


def test_a_result_that_is_discarded_before_it_is_written_down_never_is() -> None:
    broker = Broker()
    broker.finish("a")
    broker.writes.discard(broker.results.drop("s", ["a"]))
    broker.writes.note("group:g", b"note")
    broker.writes.settle(0.0)
    recovered = broker.disk.recover()
    assert (recovered.unfinished, recovered.uncollected, recovered.notes) == ([], [], {"group:g": b"note"})
    broker.writes.note("group:g", None)
    broker.writes.settle(0.0)
    assert broker.disk.recover().notes == {}
