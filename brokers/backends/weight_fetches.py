"""What ends the fetch with which a `load` begins. Pure.

Engines generate during a fetch, so ending it costs nothing. A `load`, or another version's `begin` or `set`, of a
trainer that the lease admits replaces it; `cancel` of its version cancels it; and it ends with its trainer's lease. A
fetch inside of an update that was begun, for which engines are paused, ends only by `cancel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import RequestTimeout, UpdateInProgress, UpdateNotBegun
from ...wire.messages.base import POLICY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...errors import ProrlError
    from ...wire.messages.engines import WeightUpdate
    from .trainer_lease import TrainerLease
    from .wanted_weights import ModelUpdates
    from .weight_calls import UnderWay


def ended_fetches(
    requests: Iterable[UnderWay], request: WeightUpdate, now: float, *, begun: bool
) -> list[tuple[UnderWay, ProrlError]]:
    """Return the fetches that a request ends, with the error of each.

    Args:
        requests: in progress.
        request: which the lease of the model's trainer admits.
        now: the time.
        begun: whether an update of the model was begun.

    Raises:
        UpdateInProgress: another version is being fetched, and the request does not replace it.
    """
    fetches = [one for one in requests if one.fetching and one.request.model == request.model]
    ends = [(fetch, _end_of_fetch(fetch, request, now, begun=begun)) for fetch in fetches]
    return [(fetch, error) for fetch, error in ends if error is not None]


def abandoned_fetches(
    requests: Iterable[UnderWay], trainers: Mapping[str, TrainerLease], updates: ModelUpdates, now: float
) -> list[tuple[UnderWay, ProrlError]]:
    """Return the fetches whose trainer has lost its lease, with the error of each."""
    found: list[tuple[UnderWay, ProrlError]] = []
    for fetch in requests:
        session, model, version = fetch.request.trainer, fetch.request.model, fetch.request.weight_version
        if not fetch.fetching or not session or updates.under_way(model) is not None:
            continue
        if trainers[model].is_lost(session, now):
            message = f"session {session} was not heard of any more while engine hosts fetched its weights {version}"
            found.append((fetch, RequestTimeout(message)))
    return found


def versions_fetched(requests: Iterable[UnderWay]) -> dict[str, int]:
    """Return the versions that hosts fetch now, by backend."""
    fetches = [one for one in requests if one.fetching]
    return {backend_id: fetch.request.weight_version for fetch in fetches for backend_id in fetch.missing.values()}


def check_not_loading(requests: Iterable[UnderWay], request: WeightUpdate, now: float) -> None:
    """Raise `UpdateInProgress` if engines load the weights that a client cancels: some may serve them already."""
    for one in requests:
        asked = one.request
        is_loading = asked.step == "load" and not one.fetching and one.envelope is not None
        if is_loading and (asked.model, asked.weight_version) == (request.model, request.weight_version):
            raise UpdateInProgress(
                f"engines load weights {asked.weight_version}: that cannot be cancelled; wait for the end, at most "
                f"{max(0.0, one.until - now):.0f} s",
                weight_version=asked.weight_version,
            )


def _end_of_fetch(fetch: UnderWay, request: WeightUpdate, now: float, *, begun: bool) -> ProrlError | None:
    """Return the error with which a request ends a fetch of its model; None: both continue.

    Raises:
        UpdateInProgress: the request is about another version, and does not replace the fetch.
    """
    version, wanted = fetch.request.weight_version, request.weight_version
    replaces = request.step == "load" or (request.step in ("begin", "set") and wanted != version)
    if replaces and not begun and (request.trainer or request.take_over):
        message = f"weights {version} were replaced by weights {wanted} while engine hosts fetched them"
        return UpdateInProgress(message, weight_version=wanted)
    if request.step == "cancel" and wanted == version:
        message = f"weights {version} were cancelled while engine hosts fetched them"
        return UpdateNotBegun(message, weight_version=version)
    if wanted == version:
        return None
    by = f" of session {fetch.request.trainer}" if fetch.request.trainer else ""
    named = "" if request.model == POLICY else f" --model-name {request.model}"
    raise UpdateInProgress(
        f"engine hosts fetch weights {version}{by} since {now - fetch.since:.0f} s, for at most "
        f"{max(0.0, fetch.until - now):.0f} s more, and then load them; wait for the end, or cancel the update: "
        f"`prorl backends cancel-weights {version}{named}`",
        weight_version=version,
    )
