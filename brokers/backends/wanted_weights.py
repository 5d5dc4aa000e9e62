"""`WantedWeights`: the weight version that a model's backends must serve to get jobs, and its update in progress. Pure.

After `begin`, only backends that serve the new version get jobs. `end` makes that version the wanted one: backends that
then serve another version, or later an older one, get no jobs. An update that does not end within its limit is given
up, and all backends of the model get jobs again. There is one update of a model at a time; the updates of several
models (`ModelUpdates`) are independent.

The wanted version survives the process and the service (`take_change`, `restore`); an update in progress survives the
process, and its limit starts over.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ...errors import UpdateInProgress, UpdateNotBegun
from ...wire.messages.base import POLICY, new_id
from ...wire.messages.engines import WeightUpdate
from .backend_records import WeightsRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.relay import WeightRelay
    from .backend_heap import BackendHeap

log = logging.getLogger("prorl.backend_broker")


@dataclass(frozen=True, slots=True)
class _Begun:
    version: int
    limit_s: float
    until: float


class WantedWeights:
    def __init__(self, heap: BackendHeap, model: str = POLICY) -> None:
        self._heap = heap
        self._model = model
        self._begun: _Begun | None = None
        self._loaded: tuple[int, str, str] = (0, "", "")
        """The version that engines last loaded from a path, that path, and the digest of the weights or adapter."""
        self.relay: WeightRelay | None = None
        """Where hosts fetch that version that do not see the path."""
        self._noted = WeightsRecord(model=model)

    @property
    def version(self) -> int | None:
        """The version of the update in progress; None if there is none."""
        return self._begun.version if self._begun is not None else None

    @property
    def path(self) -> str:
        """Where engines can load the wanted weights; empty if they were not loaded from a path."""
        version, path, _ = self._loaded
        return path if version == self._wanted else ""

    def digest(self, version: int) -> str:
        """Return the digest with which this version was loaded last; empty: it is not known."""
        loaded, _, digest = self._loaded
        return digest if loaded == version else ""

    def load(self, version: int, timeout_s: float) -> WeightUpdate:
        """Return a request to load the wanted version again from `path`, with its own id."""
        request = WeightUpdate(new_id(), "load", version, self.path, timeout_s=timeout_s, model=self._model)
        return msgspec.structs.replace(request, digest=self.digest(version), relay=self.relay)

    @property
    def _wanted(self) -> int:
        return self._heap.wanted_version(self._model)

    @property
    def _of_model(self) -> str:
        """How log lines and errors name the model: empty for the policy."""
        return "" if self._model == POLICY else f" of the model {self._model}"

    def begin(self, version: int, limit_s: float, now: float) -> None:
        """Begin an update; a second `begin` of the same version restarts only the limit."""
        self.check_none_but(version)
        if self._begun is None:
            self._heap.begin_update(version, self._model)
            log.info("weights %d%s are on their way", version, self._of_model)
        self._begun = _Begun(version, limit_s, now + limit_s)

    def end(self, version: int, path: str = "", digest: str = "", relay: WeightRelay | None = None) -> bool:
        """Make this version, loaded from `path`, the wanted one; return whether that changes anything.

        Without a `begin`, raise `UpdateNotBegun` unless a backend serves the version and it is not older than the
        wanted one.
        """
        self.check_none_but(version)
        wanted = self._wanted
        if self._begun is None:
            if version < wanted or not self._heap.serves(version, self._model):
                raise UpdateNotBegun(
                    f"no update to weights {version}{self._of_model} was begun, or it was given up since its end did "
                    f"not come in time; {wanted} are wanted",
                    weight_version=version,
                )
            if version == wanted:
                return False
        self._begun, self._loaded, self.relay = None, (version, path, digest), relay
        self._heap.end_update(version, self._model)
        log.info("weights %d%s are served", version, self._of_model)
        return True

    def cancel(self, version: int) -> bool:
        """End an update without new weights; return whether there was one."""
        self.check_none_but(version)
        if self._begun is None:
            return False
        self._begun = None
        self._heap.give_up_update(model=self._model)
        log.info("weights %d%s will not come", version, self._of_model)
        return True

    def check_none_but(self, version: int | None) -> None:
        begun = self._begun
        if begun is not None and begun.version != version:
            raise UpdateInProgress(
                f"an update to weights {begun.version}{self._of_model} was begun and has not ended; end or cancel it "
                f"first (`prorl backends end-weights {begun.version}` or `cancel-weights`)",
                weight_version=begun.version,
            )

    def tick(self, now: float) -> bool:
        begun = self._begun
        if begun is None or begun.until > now:
            return False
        self._begun = None
        note = (
            f"an update to weights {begun.version}{self._of_model} did not end within {begun.limit_s:g} s and was "
            "given up"
        )
        log.warning("%s: all its backends get jobs again, with the weights that they have", note)
        self._heap.give_up_update(note, self._model)
        return True

    def next_deadline(self) -> float | None:
        return self._begun.until if self._begun is not None else None

    # What outlives the process ----------------------------------------------------------------------------------------

    @property
    def record(self) -> WeightsRecord:
        """The record for the journal, as of the last `changed`."""
        return self._noted

    def changed(self) -> bool:
        """Return whether the record for the journal changed since the last call."""
        base = self._heap.adapters.bases.get(self._model, "")
        wanted = self._wanted
        path, relay = self.path, self.relay if self.path else None
        record = WeightsRecord(wanted, path=path, model=self._model, base=base, digest=self.digest(wanted), relay=relay)
        if self._begun is not None:
            record = msgspec.structs.replace(record, begun=self._begun.version, limit_s=self._begun.limit_s)
        before, self._noted = self._noted, record
        return record != before

    def restore(self, record: WeightsRecord, now: float, *, of_before: bool = False) -> None:
        """Restore an earlier process's record, after the heap has its wanted version and backends.

        With `of_before` the record is of an earlier service, whose update in progress is given up.
        """
        self._noted = record
        self._loaded, self.relay = (record.wanted, record.path, record.digest), record.relay
        if record.begun is not None and not of_before:
            self.begin(record.begun, record.limit_s, now)


class ModelUpdates:
    """The `WantedWeights` of the models that trainers update."""

    def __init__(self, heap: BackendHeap) -> None:
        self._heap = heap
        self._models: dict[str, WantedWeights] = {}
        self._forgotten = False
        """Whether a model was forgotten since the last `take_change`."""

    def of(self, model: str) -> WantedWeights:
        """Return a model's weights, created on first use."""
        if model not in self._models:
            self._models[model] = WantedWeights(self._heap, model)
        return self._models[model]

    def forget(self, model: str) -> None:
        """Forget an adapter."""
        self._forgotten = self._models.pop(model, None) is not None or self._forgotten
        self._heap.set_base(model, None)

    def forget_unpublished(self, model: str) -> None:
        """Forget an adapter that has neither a version nor an update in progress."""
        adapters = self._heap.adapters
        if model in adapters and model not in adapters.published() and self.under_way(model) is None:
            self.forget(model)

    def under_way(self, model: str) -> int | None:
        """Return the version of a model's update in progress; None if there is none."""
        return self._models[model].version if model in self._models else None

    def tick(self, now: float) -> bool:
        """Give up updates that are late; return whether there was one."""
        late = [model for model, weights in self._models.items() if weights.tick(now)]
        for model in late:
            self.forget_unpublished(model)
        return bool(late)

    def next_deadline(self) -> float | None:
        deadlines = (weights.next_deadline() for weights in self._models.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def take_change(self) -> tuple[WeightsRecord, ...] | None:
        """Return the records of all models for the journal if one changed since the last call."""
        changed = [weights for weights in self._models.values() if weights.changed()]
        if not changed and not self._forgotten:
            return None
        self._forgotten = False
        return tuple(weights.record for weights in self._models.values())

    def restore(self, records: Iterable[WeightsRecord], now: float, *, of_before: bool = False) -> None:
        """Restore an earlier process's records; see `WantedWeights.restore`."""
        for record in records:
            self.of(record.model).restore(record, now, of_before=of_before)
            self.forget_unpublished(record.model)
