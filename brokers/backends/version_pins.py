"""`VersionPins`: the versions of adapters on which attempts of jobs are to end, by holder. Pure.

A pin outlives its assignment, since the job's backend may be lost and come back with the version. It ends with the
holder's release, with a newer attempt, or with its owner.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from ...wire.messages.base import POLICY

if TYPE_CHECKING:
    from collections.abc import KeysView, Mapping

    from ...wire.messages.backends import HeldAssignment


class _Pin(NamedTuple):
    owner: str
    attempt: int
    version: int


class VersionPins:
    def __init__(self) -> None:
        self.by_job: dict[str, dict[str, _Pin]] = {}
        """By job and holder; for callers to see whether there is any."""
        self._owned: dict[str, set[str]] = {}
        """The holders, by owner."""
        self._counts: Counter[tuple[str, int]] = Counter()
        """By model and version."""

    def add(self, owner: str, holder_id: str, attempt: int, version: int | None) -> None:
        """Pin an attempt to a version, unless a newer attempt is pinned; the pin of an older one ends.

        None: the attempt is not pinned yet.
        """
        job_id = holder_id.partition("/")[0]
        known = self.by_job.get(job_id, {}).get(holder_id)
        if known is not None and known.attempt > attempt:
            return
        self.drop(holder_id, attempt - 1 if version is None else attempt)
        if version is None:
            return
        self.by_job.setdefault(job_id, {})[holder_id] = _Pin(owner, attempt, version)
        self._owned.setdefault(owner, set()).add(holder_id)
        self._counts[_model(holder_id), version] += 1

    def drop(self, holder_id: str, attempt: int) -> None:
        """End the pin of an attempt, or of an older one."""
        job_id = holder_id.partition("/")[0]
        pin = self.by_job.get(job_id, {}).get(holder_id)
        if pin is None or pin.attempt > attempt:
            return
        del self.by_job[job_id][holder_id]
        if not self.by_job[job_id]:
            del self.by_job[job_id]
        self._owned[pin.owner].discard(holder_id)
        if not self._owned[pin.owner]:
            del self._owned[pin.owner]
        key = _model(holder_id), pin.version
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]

    def keep_only(self, owner: str, jobs: Mapping[str, HeldAssignment]) -> None:
        for holder_id in tuple(self._owned.get(owner, ())):
            attempt = self.by_job[holder_id.partition("/")[0]][holder_id].attempt
            named = jobs.get(holder_id)
            if named is None or named.attempt != attempt:
                self.drop(holder_id, attempt)

    def owners(self) -> KeysView[str]:
        return self._owned.keys()

    def versions(self, model: str) -> set[int]:
        """Return the versions of a model to which attempts are pinned."""
        return {version for of_model, version in self._counts if of_model == model}


def _model(holder_id: str) -> str:
    return holder_id.partition("/")[2] or POLICY
