"""`JobMirror`: a copy of one rollout broker's table of jobs, built from its `Watched` replies. Pure.

Each round asks for new changes, and once more for older changes that did not fit into earlier replies (the gap). So new
changes appear at once, and all of them once fewer jobs change than a reply holds. After a restart of the broker, or if
it forgot jobs that were never asked for, everything is asked for again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..wire.messages.watching import JobRow, Watched


class Question(NamedTuple):
    """The fields of a `Watch`."""

    broker_id: str
    since: int
    before: int


class Answered(NamedTuple):
    """What an answer has changed."""

    changed: tuple[JobRow, ...]
    forgotten: tuple[str, ...] = ()
    """Jobs whose rows are gone."""
    reset: bool = False
    """All earlier rows may be gone: look at `rows` again."""


class JobMirror:
    def __init__(self, limit: int) -> None:
        self.rows: dict[str, JobRow] = {}
        """By job; beyond the limit, those that ended first are dropped."""
        self._limit = limit
        self._broker_id = ""
        self._until = 0
        self._sure = 0
        """All changes of known jobs up to this number are known."""
        self._gap: tuple[int, int] | None = None
        """Changes between these numbers are not known."""

    def news(self) -> Question:
        return Question(self._broker_id, self._until, 0)

    def gap(self) -> Question | None:
        return Question(self._broker_id, *self._gap) if self._gap is not None else None

    def take(self, question: Question, answer: Watched) -> Answered:
        """Apply the answer to a question."""
        restarted = answer.broker_id != self._broker_id
        reset = restarted or answer.forgotten_until > self._sure
        knew_all = self._sure == self._until
        if restarted:
            self.rows = {}
            self._broker_id = answer.broker_id
            self._gap = (0, answer.first) if answer.more else None
        elif reset:  # of jobs that had not ended, it is not known which of them have
            self.rows = {job_id: row for job_id, row in self.rows.items() if row.place == "ended"}
            self._gap = (0, answer.until + 1)
        elif question.before:
            self._gap = (question.since, answer.first) if answer.more else None
        elif answer.more:
            self._gap = (self._gap[0] if self._gap is not None else question.since, answer.first)
        if reset or not question.before:
            self._until = answer.until
        if reset or self._gap is None or (knew_all and not answer.more):
            self._sure = self._until
        self.rows.update((row.job_id, row) for row in answer.jobs)
        return Answered(answer.jobs, self._cut(), reset)

    def _cut(self) -> tuple[str, ...]:
        """Drop the oldest rows, many at a time, since finding them is slow."""
        if len(self.rows) <= self._limit:
            return ()
        oldest = sorted(self.rows.values(), key=lambda row: (row.place != "ended", row.entered_at))
        gone = tuple(row.job_id for row in oldest[: len(oldest) - self._limit * 9 // 10])
        for job_id in gone:
            del self.rows[job_id]
        return gone
