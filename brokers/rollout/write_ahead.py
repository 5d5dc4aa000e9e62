"""Write-ahead rule: nothing is sent until the state it depends on is durable.

Events and requests change the job table and the results at once; the resulting messages wait here. At the end of the
round all changes are written to the journal in one transaction, then the messages are sent.

While the journal cannot be written, nothing is sent: changes stay in memory and are retried, new jobs are rejected, and
results wait. A retry writes in parts whatever fits, first deletions, so clients that collect results end the failure.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ...errors import JournalFailed
from ...metrics.catalog import JOBS_SUBMITTED, JOURNAL_WRITE_SECONDS
from ...wire.messages.jobs import Phase
from .actions import End, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ...wire.sockets import Frame
    from ..journal.journal import Journal
    from ..journal.records import Finished, JobState, StoredBlock, Submission
    from .actions import Action
    from .job_table import JobTable
    from .result_store import ResultStore
    from .transition_log import TransitionLog

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 5.0
"""First and longest pause between two retries of a failed write, in seconds."""
ACKNOWLEDGED_WITHIN_S = 0.05
"""Seconds that an acknowledgement may wait for other changes; after a crash the client gets the result again."""
MEMORY_LIMIT_BYTES = 256 * 2**20
"""Memory limit of uncollected trajectories; beyond it they are read back from the journal."""

log = logging.getLogger("prorl.rollout_broker")


class WriteAhead:
    """Queues messages until the journal is written. `act` performs an action of the job table and must not raise."""

    def __init__(
        self,
        journal: Journal,
        table: JobTable,
        results: ResultStore,
        transitions: TransitionLog,
        act: Callable[[Action], None],
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        self._journal = journal
        self._table = table
        self._results = results
        self._transitions = transitions
        self._act = act
        self._memory_limit_bytes = memory_limit_bytes
        self._states: dict[int, JobState] = {}
        self._ended: dict[int, Finished] = {}
        self._acknowledged: list[int] = []
        self._discarded: list[int] = []
        self._notes: dict[str, bytes | None] = {}
        self.collect_notes: Callable[[], None] = lambda: None
        """Makes the batches `note` their changes."""
        self._acknowledged_by = 0.0
        """When the oldest acknowledgement must be written; 0.0 if there is none."""
        self._waiting: list[Action | Callable[[], object]] = []
        self._stops: set[Stop] = set()
        """The stops among `_waiting`, which repeated reports request repeatedly."""
        self._news: set[str] = set()
        self._refusing = False
        self._failure: JournalFailed | None = None
        self._pause_s = 0.0
        self._retry_at = 0.0

    @property
    def journal_id(self) -> str:
        return self._journal.journal_id

    @property
    def journal_bytes(self) -> int:
        return self._journal.size_bytes

    @property
    def retry_at(self) -> float | None:
        """When to `settle` again without a new event; None if there is no need."""
        if self.is_stuck:
            return self._retry_at
        return self._acknowledged_by or None

    @property
    def is_stuck(self) -> bool:
        """Whether the journal cannot be written and changes wait for it."""
        return self._failure is not None and self._is_dirty

    def perform(self, action: Action) -> None:
        """Perform an action of the job table after the journal has what it depends on."""
        if isinstance(action, End):
            finished = action.finished._replace(history=self._transitions.packed(action.finished.result.job_id))
            self._states.pop(finished.sequence, None)
            self._ended[finished.sequence] = finished
            self._results.hold_back(finished)
        elif not isinstance(action, Stop):
            self._waiting.append(action)
        elif action not in self._stops:
            self._stops.add(action)
            self._waiting.append(action)

    def then(self, send: Callable[[], object]) -> None:
        """Call `send` once all changes until now are durable."""
        self._waiting.append(send)

    def acknowledge(self, dropped: Iterable[Finished]) -> None:
        self._acknowledged += [finished.sequence for finished in dropped]

    def discard(self, dropped: Iterable[Finished]) -> None:
        for finished in dropped:
            if self._ended.pop(finished.sequence, None) is not None:
                self._discarded.append(finished.sequence)
            else:
                self._acknowledged.append(finished.sequence)

    def check_room(self, size_bytes: int) -> None:
        if self.is_stuck and self._failure is not None:
            raise self._refusal(self._failure)
        self._journal.check_room(size_bytes)

    def note(self, name: str, note: bytes | None) -> None:
        """Set a note of the journal; None removes it."""
        self._notes[name] = note

    def replace(self, finished: Finished) -> None:
        """Rewrite a changed result, which is held back until it is durable."""
        self._ended[finished.sequence] = finished
        self._results.hold_back(finished)

    def accept(
        self,
        jobs: Sequence[JobState],
        now: float,
        submission: Submission | None = None,
        replaced: Sequence[int] = (),
    ) -> None:
        """Write new jobs before the table has them, and delete the results numbered `replaced`."""
        self.settle(now, everything=True)  # an acknowledged result may have had one of these ids
        if self._failure is not None and now < self._retry_at:
            raise self._refusal(self._failure)
        began = time.perf_counter()
        try:
            self._journal.accept(jobs, submission, replaced)
        except JournalFailed as error:
            if not self._refusing:
                log.error("new jobs are refused: %s", error.message)  # noqa: TRY400 - it says it all
            self._refusing = True
            raise self._refusal(error) from error
        self._refusing = False
        JOURNAL_WRITE_SECONDS.observe(time.perf_counter() - began)
        for job in jobs:
            JOBS_SUBMITTED.add(job.task)

    def block(self, stored: StoredBlock) -> Frame:
        return self._journal.block(stored)

    def settle(self, now: float, *, everything: bool = False) -> None:
        """Write all changes, then send the messages that wait; after a failure do neither, and retry later.

        With `everything`, acknowledgements that could wait are written too.
        """
        self.collect_notes()
        for state in self._table.take_changes(self._transitions.packed):
            self._states[state.sequence] = state
        if self._acknowledged and not self._acknowledged_by:
            self._acknowledged_by = now + ACKNOWLEDGED_WITHIN_S
        at_once = self._states or self._ended or self._discarded or self._notes or everything
        can_wait = not at_once and now < self._acknowledged_by
        if self._is_dirty and not can_wait and not self._write(now):
            return
        waiting, self._waiting = self._waiting, []
        self._stops.clear()
        for one in waiting:
            if callable(one):
                one()
            else:
                self._act(one)

    def take_news(self) -> set[str]:
        """Return the sessions that got results since the last call."""
        news, self._news = self._news, set()
        return news

    @property
    def _is_dirty(self) -> bool:
        return bool(self._states or self._ended or self._acknowledged or self._discarded or self._notes)

    def _write(self, now: float) -> bool:
        if self._failure is not None and now < self._retry_at:
            return False
        began = time.perf_counter()
        try:
            if self._failure is not None:
                self._write_what_fits()
            states = list(self._states.values())
            ended = list(self._ended.values())
            self._journal.write(states, ended, self._acknowledged, self._discarded, self._notes)
        except JournalFailed as error:
            self._fail(error, now)
            return False
        except Exception as error:
            log.exception("the journal failed")  # a bug must not affect all jobs
            self._fail(JournalFailed(f"the journal cannot be written: {type(error).__name__}: {error}"), now)
            return False
        self._states.clear()
        self._ended.clear()
        self._acknowledged, self._acknowledged_by = [], 0.0
        self._discarded, self._notes = [], {}
        JOURNAL_WRITE_SECONDS.observe(time.perf_counter() - began)
        self._unload(states)
        self._let_go(ended)
        self._succeed()
        return True

    def _write_what_fits(self) -> None:
        """Write in small parts, which may fit where everything together does not."""
        forgotten = {name: note for name, note in self._notes.items() if note is None}
        self._journal.write((), (), self._acknowledged, self._discarded, forgotten)
        self._acknowledged, self._acknowledged_by = [], 0.0
        self._discarded = []
        for name in forgotten:
            del self._notes[name]
        for sequence, finished in tuple(self._ended.items()):
            self._journal.write((), (finished,), ())
            del self._ended[sequence]
            self._let_go([finished])

    def _let_go(self, ended: Iterable[Finished]) -> None:
        for finished in ended:
            full = self._results.memory_bytes > self._memory_limit_bytes
            self._results.put(self._journal.unloaded(finished) if full else finished)
            self._news.add(finished.holder)

    def _unload(self, states: Iterable[JobState]) -> None:
        """Drop the trajectories of jobs in SCORE from memory: any number of jobs may wait for a teacher."""
        for state in states:
            record = self._table.records.get(state.job_id) if state.phase == Phase.SCORE else None
            if record is not None and record.block is not None and record.block is state.block:
                record.block = self._journal.unloaded(state).block

    def _fail(self, error: JournalFailed, now: float) -> None:
        if self._failure is None:
            log.error("%s; new jobs are refused until then, and what there is waits", error.message)
        self._failure = error
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), MAX_PAUSE_S)
        self._retry_at = now + self._pause_s

    def _succeed(self) -> None:
        if self._failure is not None:
            log.warning("the journal is written again")
            self._failure = None
            self._pause_s = 0.0

    def _refusal(self, error: JournalFailed) -> JournalFailed:
        return JournalFailed(
            f"{error.message}; no new jobs are taken until then", **{**error.fields, "retry_after_s": MAX_PAUSE_S}
        )
