"""`WantedWeights`: the weight version that backends must serve to get jobs, and the update in progress. Pure.

After `begin`, only backends that serve the new version get jobs. `end` makes that version the wanted one: backends that
then serve another version, or later an older one, get no jobs. An update that does not end within its limit is given
up, and all backends get jobs again. There is one update at a time.

The wanted version survives the process and the service (`take_change`, `restore`); an update in progress survives the
process, and its limit starts over.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ...errors import UpdateInProgress, UpdateNotBegun
from .backend_records import WeightsRecord

if TYPE_CHECKING:
    from .backend_heap import BackendHeap

log = logging.getLogger("prorl.backend_broker")


@dataclass(frozen=True, slots=True)
class _Begun:
    version: int
    limit_s: float
    until: float


class WantedWeights:
    def __init__(self, heap: BackendHeap) -> None:
        self._heap = heap
        self._begun: _Begun | None = None
        self._loaded: tuple[int, str] = (0, "")
        """The version that engines last loaded from a path, and that path."""
        self._noted = WeightsRecord()

    @property
    def version(self) -> int | None:
        """The version of the update in progress; None if there is none."""
        return self._begun.version if self._begun is not None else None

    @property
    def path(self) -> str:
        """Where engines can load the wanted weights; empty if they were not loaded from a path."""
        version, path = self._loaded
        return path if version == self._heap.wanted_version else ""

    def begin(self, version: int, limit_s: float, now: float) -> None:
        """Begin an update; a second `begin` of the same version restarts only the limit."""
        self.check_none_but(version)
        if self._begun is None:
            self._heap.begin_update(version)
            log.info("weights %d are on their way", version)
        self._begun = _Begun(version, limit_s, now + limit_s)

    def end(self, version: int, path: str = "") -> bool:
        """Make this version, loaded from `path`, the wanted one; return whether that changes anything.

        Without a `begin`, raise `UpdateNotBegun` unless a backend serves the version and it is not older than the
        wanted one.
        """
        self.check_none_but(version)
        wanted = self._heap.wanted_version
        if self._begun is None:
            if version < wanted or not self._heap.serves(version):
                raise UpdateNotBegun(
                    f"no update to weights {version} was begun, or it was given up since its end did not come in time; "
                    f"{self._heap.wanted_version} are wanted",
                    weight_version=version,
                )
            if version == wanted:
                return False
        self._begun, self._loaded = None, (version, path)
        self._heap.end_update(version)
        log.info("weights %d are served", version)
        return True

    def cancel(self, version: int) -> bool:
        """End an update without new weights; return whether there was one."""
        self.check_none_but(version)
        if self._begun is None:
            return False
        self._begun = None
        self._heap.give_up_update()
        log.info("weights %d will not come", version)
        return True

    def check_none_but(self, version: int | None) -> None:
        begun = self._begun
        if begun is not None and begun.version != version:
            raise UpdateInProgress(
                f"an update to weights {begun.version} was begun and has not ended; end or cancel it first "
                f"(`prorl backends end-weights {begun.version}` or `cancel-weights`)",
                weight_version=begun.version,
            )

    def tick(self, now: float) -> bool:
        begun = self._begun
        if begun is None or begun.until > now:
            return False
        self._begun = None
        note = f"an update to weights {begun.version} did not end within {begun.limit_s:g} s and was given up"
        log.warning("%s: all backends get jobs again, with the weights that they have", note)
        self._heap.give_up_update(note)
        return True

    def next_deadline(self) -> float | None:
        return self._begun.until if self._begun is not None else None

    # What outlives the process ----------------------------------------------------------------------------------------

    def take_change(self) -> WeightsRecord | None:
        """Return the record for the journal if it changed since the last call."""
        record = WeightsRecord(self._heap.wanted_version, path=self.path)
        if self._begun is not None:
            record = msgspec.structs.replace(record, begun=self._begun.version, limit_s=self._begun.limit_s)
        if record == self._noted:
            return None
        self._noted = record
        return record

    def restore(self, record: WeightsRecord, now: float, *, of_before: bool = False) -> None:
        """Restore an earlier process's record, after the heap has its wanted version and backends.

        With `of_before` the record is of an earlier service, whose update in progress is given up.
        """
        self._noted = record
        self._loaded = (record.wanted, record.path)
        if record.begun is not None and not of_before:
            self.begin(record.begun, record.limit_s, now)
