"""`JobChanges`: in which order jobs have changed, so that who watches is told what is new. Pure.

A job has the number of its last change only. So noting one costs the same however many jobs there are and whoever
watches, and who has not asked for long gets each job once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ...wire.messages.base import new_id


class Changed(NamedTuple):
    job_ids: list[str]
    """The newest first."""
    first: int
    """The number of the last of them."""
    more: bool
    """There are older ones."""


class JobChanges:
    def __init__(self) -> None:
        self.broker_id = new_id()
        """Names what the numbers count."""
        self.until = 0
        """The number of the newest change."""
        self.forgotten_until = 0
        """The number of the newest change of a job that is forgotten."""
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """By job, the newest last."""

    def note(self, job_id: str) -> None:
        self.until += 1
        self._numbers[job_id] = self.until
        self._numbers.move_to_end(job_id)

    def forget(self, job_id: str) -> None:
        self.forgotten_until = max(self.forgotten_until, self._numbers.pop(job_id, 0))

    def between(self, since: int, before: int, limit: int) -> Changed:
        """Return the newest jobs whose number is after `since` and, unless that is 0, before `before`."""
        found: list[str] = []
        first = self.until + 1
        for job_id, number in reversed(self._numbers.items()):
            if number <= since:
                break
            if before and number >= before:
                continue
            if len(found) == limit:
                return Changed(found, first, more=True)
            found.append(job_id)
            first = number
        return Changed(found, first, more=False)
