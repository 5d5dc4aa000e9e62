"""`JobMirror`: the jobs of one rollout broker as its `Watched` replies tell of them. Pure.

Each round asks for what is new, and once more for older changes that had no room in earlier replies (the gap). So what
is new is there at once, and all of it as soon as fewer jobs change than a reply holds. A broker that was restarted, or
that has forgotten jobs before they were asked for, is asked for everything again.
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
        """By job; of more than the limit, those go that ended first."""
        self._limit = limit
        self._broker_id = ""
        self._until = 0
        self._sure = 0
        """Of jobs that are known, all changes until this one are."""
        self._gap: tuple[int, int] | None = None
        """Changes between these numbers are not known."""

    def news(self) -> Question:
        return Question(self._broker_id, self._until, 0)

    def gap(self) -> Question | None:
        return Question(self._broker_id, *self._gap) if self._gap is not None else None

    def take(self, question: Question, answer: Watched) -> Answered:
        """Take up the answer to a question."""
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
        """Forget the oldest rows, many at a time: finding them takes a while."""
        if len(self.rows) <= self._limit:
            return ()
        oldest = sorted(self.rows.values(), key=lambda row: (row.place != "ended", row.entered_at))
        gone = tuple(row.job_id for row in oldest[: len(oldest) - self._limit * 9 // 10])
        for job_id in gone:
            del self.rows[job_id]
        return gone
