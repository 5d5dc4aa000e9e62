"""A mirror of a broker's jobs, in front of what a broker answers from: in the end it has what that has."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.journal.journal import MemoryJournal
from prorl_zmq.brokers.journal.records import Finished
from prorl_zmq.brokers.rollout.actions import End, Queued, Start
from prorl_zmq.brokers.rollout.batch_runner import BatchRunner
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.brokers.rollout.jobs import Jobs
from prorl_zmq.brokers.rollout.kept_blocks import KeptBlocks
from prorl_zmq.brokers.rollout.quota import Quota
from prorl_zmq.brokers.rollout.result_store import ResultStore
from prorl_zmq.brokers.rollout.sized_cache import SizedCache
from prorl_zmq.brokers.rollout.task_catalog import TaskCatalog
from prorl_zmq.brokers.rollout.transition_log import TransitionLog
from prorl_zmq.brokers.rollout.watch_requests import WatchRequestHandler
from prorl_zmq.brokers.rollout.write_ahead import WriteAhead
from prorl_zmq.watching.job_mirror import Answered, JobMirror
from prorl_zmq.wire.messages.jobs import Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import StartPhase
from prorl_zmq.wire.messages.watching import JobRow, Watch

ENDED_LIMIT = 2
JOBS = [f"job-{number}" for number in range(12)]


class Broker:
    """What a rollout broker answers watchers from."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.begin()

    def begin(self) -> None:
        """Start (again), with nothing of before."""
        self.history = TransitionLog(ended_limit=ENDED_LIMIT)
        table, results = JobTable(10.0, 64, 2.5), ResultStore()
        writes = WriteAhead(MemoryJournal(), table, results, self.history, lambda action: None)
        quota = Quota(100, 2**30, 1.0)
        jobs = Jobs(table, results, self.history, quota, writes, KeptBlocks(10.0), SizedCache(2**20))
        self.handler = WatchRequestHandler(jobs, BatchRunner(jobs, TaskCatalog(), 2**20))
        self.live: set[str] = set()

    def happen(self, what: str, job_id: str) -> None:
        self.at += 1.0
        if job_id not in self.live:
            self.live.add(job_id)
            self.history.note(Queued(job_id, 1, Phase.INIT, None), self.at)
        elif what == "start":
            command = StartPhase(job_id=job_id, attempt=1, phase=Phase.RUN)
            self.history.note(Start("run-1", command, b"", "node-1"), self.at)
        elif what == "assign":
            self.history.assigned(job_id, 1, f"engine-{self.at:g}", self.at)
        else:
            self.live.discard(job_id)
            result = Result(job_id=job_id, task="math", outcome=Outcome.COMPLETED, reward=self.at)
            self.history.note(End(Finished("s", result, None)), self.at)

    def ask(self, mirror: JobMirror, question: Any, limit: int) -> Answered:
        answer, _ = self.handler.answer(Watch("r", *question, limit), 0.0)
        return mirror.take(question, answer)  # type: ignore[arg-type]

    def rows(self) -> dict[str, JobRow]:
        answer, _ = self.handler.answer(Watch("r", limit=2000), 0.0)
        return {row.job_id: row for row in answer.jobs}  # type: ignore[union-attr]


class Viewer(NamedTuple):
    """Applies updates as a page does."""

    rows: dict[str, JobRow]

    def apply(self, mirror: JobMirror, answered: Answered) -> None:
        if answered.reset:
            self.rows.clear()
            self.rows.update(mirror.rows)
        self.rows.update((row.job_id, row) for row in answered.changed)
        for job_id in answered.forgotten:
            self.rows.pop(job_id, None)


EVENTS = st.tuples(st.sampled_from(["start", "assign", "end", "end"]), st.sampled_from(JOBS))
ASKED = st.tuples(st.just("ask"), st.sampled_from(["news", "gap"]))
STEPS = st.lists(st.one_of(*[EVENTS] * 8, ASKED, ASKED), min_size=30, max_size=100)


@given(STEPS, st.integers(1, 5), st.one_of(st.none(), st.integers(0, 99)))
def test_whoever_asks_in_any_rhythm_ends_with_the_rows_of_the_history(
    steps: list[tuple[str, str]], limit: int, restart_at: int | None
) -> None:
    broker, mirror, viewer = Broker(), JobMirror(1000), Viewer({})
    for number, (what, which) in enumerate(steps):
        if number == restart_at:
            broker.begin()
        if what != "ask":
            broker.happen(what, which)
        elif (question := mirror.news() if which == "news" else mirror.gap()) is not None:
            viewer.apply(mirror, broker.ask(mirror, question, limit))
    rounds = 0
    viewer.apply(mirror, broker.ask(mirror, mirror.news(), limit))
    while (question := mirror.gap()) is not None:
        viewer.apply(mirror, broker.ask(mirror, question, limit))
        rounds += 1
        assert rounds <= 2 * len(JOBS) + 2
    known = broker.rows()
    assert {job_id: row for job_id, row in mirror.rows.items() if job_id in known} == known
    assert all(row.place == "ended" for job_id, row in mirror.rows.items() if job_id not in known)
    assert viewer.rows == mirror.rows
    assert broker.ask(mirror, mirror.news(), limit) == Answered(())


def test_what_is_new_comes_before_what_was_left_out() -> None:
    broker, mirror = Broker(), JobMirror(1000)
    for job_id in JOBS:
        broker.happen("queue", job_id)
    broker.ask(mirror, mirror.news(), 2)
    assert set(mirror.rows) == {"job-11", "job-10"}
    broker.happen("start", "job-0")
    broker.ask(mirror, mirror.news(), 2)
    assert mirror.rows["job-0"].place == "held"
    while (question := mirror.gap()) is not None:
        broker.ask(mirror, question, 4)
    assert set(mirror.rows) == set(JOBS)


def test_the_oldest_ended_jobs_go_first_when_there_are_too_many() -> None:
    broker, mirror, viewer = Broker(), JobMirror(10), Viewer({})
    broker.happen("queue", "under-way")
    for number in range(30):
        broker.happen("queue", f"job-{number}")
        broker.happen("end", f"job-{number}")
        viewer.apply(mirror, broker.ask(mirror, mirror.news(), 100))
        assert len(mirror.rows) <= 10
    assert {"under-way", "job-29", "job-28"} < set(mirror.rows)
    assert viewer.rows == mirror.rows
