"""How a trainer's client gives all backends new weights: the two halves of an update, and the whole of it.

The backend broker is told first, so that from then on no job gets a backend that is behind, then every engine host at
one time; at the end the other way round. The hosts and the broker keep what was begun (see `inference.engine_updates`
and `brokers.wanted_weights`); here is no state, so any client may end or cancel what another one began. A client that
dies in between leaves that to their limits.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import ProrlError, UnknownBackend, UpdateNotBegun
from ..wire.messages.backends import BeginWeights, CancelWeights, EndWeights, SetWeightVersion
from ..wire.messages.base import new_id
from ..wire.messages.engines import BeginUpdate, CancelUpdate, EndUpdate, NoteWeightVersion, UpdateWeights
from .backends import left_s

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..wire.messages.engines import UpdateMode
    from .backends import Backends

    Outcomes = Mapping[str, ProrlError | None]

UPDATE_LIMIT_S = 600.0
"""How long engines wait for the end of an update, unless they are told otherwise: beyond it the trainer is dead."""
UPDATE_LIMIT_MOST_S = 7 * 86400.0
CANCEL_S = 5.0
"""Longest wait for each answer while an update that failed is taken back; what does not answer has its limit."""


class Weights:
    """Updates the weights of all backends; a part of `RolloutClient`, whose methods say what each of these raises."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def begin(self, version: int, mode: UpdateMode, limit_s: float, until: float) -> None:
        """See `RolloutClient.begin_weights`."""
        self._backends.ask(BeginWeights(new_id(), version, limit_s), left_s(until))
        try:
            outcomes = self._backends.tell_engines(lambda: BeginUpdate(new_id(), version, limit_s, mode), until)
            raise_first(outcomes)
        except BaseException:
            self._take_back(version)
            raise

    def end(self, version: int, until: float) -> None:
        """See `RolloutClient.end_weights`."""
        outcomes = self._backends.tell_engines(lambda: EndUpdate(new_id(), version), until)
        if done(outcomes):
            self._note(version, outcomes)
            self._backends.ask(EndWeights(new_id(), version), noting_s(until))
        raise_first_of_end(outcomes)

    def cancel(self, version: int, until: float) -> None:
        """See `RolloutClient.cancel_weights`."""
        outcomes = self._backends.tell_engines(lambda: CancelUpdate(new_id(), version), until)
        self._backends.ask(CancelWeights(new_id(), version), noting_s(until))
        raise_first(outcomes)

    def update(self, path: Path | str, version: int, mode: UpdateMode, until: float) -> None:
        """See `RolloutClient.update_weights`."""
        self._backends.ask(BeginWeights(new_id(), version, limit_of(until)), left_s(until))
        try:
            outcomes = self._backends.tell_engines(lambda: UpdateWeights(new_id(), str(path), version, mode), until)
        except BaseException:
            self._forget(version)
            raise
        if done(outcomes):
            self._note(version, outcomes)
            self._backends.ask(EndWeights(new_id(), version), noting_s(until))
        else:
            self._forget(version)
        raise_first(outcomes)

    def set_version(self, version: int, until: float) -> None:
        """See `RolloutClient.set_weight_version`."""
        self._backends.ask(SetWeightVersion(new_id(), version), left_s(until))
        raise_first(self._backends.tell_engines(lambda: NoteWeightVersion(new_id(), version), until))

    def _note(self, version: int, outcomes: Outcomes) -> None:
        """Tell the backend broker at once; heartbeats would, in a second."""
        for backend_id in done(outcomes):
            with suppress(UnknownBackend):  # it has left meanwhile
                self._backends.ask(SetWeightVersion(new_id(), version, backend_id), CANCEL_S)

    def _take_back(self, version: int) -> None:
        with suppress(ProrlError):
            self._backends.tell_engines(lambda: CancelUpdate(new_id(), version), time.monotonic() + CANCEL_S)
        self._forget(version)

    def _forget(self, version: int) -> None:
        with suppress(ProrlError):
            self._backends.ask(CancelWeights(new_id(), version), CANCEL_S)


def done(outcomes: Outcomes) -> list[str]:
    """Give the backends that did what they were asked."""
    return [backend_id for backend_id, error in outcomes.items() if error is None]


def raise_first(outcomes: Outcomes) -> None:
    """Raise the first error that says why a backend failed; that it had begun nothing explains the least.

    Raises:
        ProrlError: one backend, at least, did not do what it was asked.
    """
    errors = [error for error in outcomes.values() if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, UpdateNotBegun)):
        raise error


def raise_first_of_end(outcomes: Outcomes) -> None:
    """Raise as `raise_first`, but let backends be that came too late for the begin, where others have ended.

    They are behind, which the backend broker knows: they get no jobs until they serve the version.

    Raises:
        ProrlError: an engine failed in ending, or no backend had begun.
    """
    some = bool(done(outcomes))
    raise_first({key: error for key, error in outcomes.items() if not (some and isinstance(error, UpdateNotBegun))})


def limit_of(until: float) -> float:
    """Give how long an update may take, in seconds, that must be over by a time of `time.monotonic`."""
    return min(max(1.0, left_s(until)), UPDATE_LIMIT_MOST_S)


def noting_s(until: float) -> float:
    """Give how long the backend broker may take to note what engines have done, which may have used up all time."""
    return max(CANCEL_S, left_s(until))
