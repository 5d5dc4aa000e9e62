"""`no_backend`: the error of a job that got no backend in time, with what to do about it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import NoBackend
from ...wire.messages.base import POLICY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.backends import Assign, BackendStatus
    from .backend_heap import BackendHeap
    from .engine_starts import EngineStarts
    from .wanted_weights import ModelUpdates


def no_backend(
    request: Assign, waited_s: float, heap: BackendHeap, starts: EngineStarts, updates: ModelUpdates
) -> NoBackend:
    """Return the error that answers a request.

    Args:
        request: of the job.
        waited_s: the duration of its wait, in seconds.
        heap: all backends.
        starts: engines that start, or failed to.
        updates: of weights.
    """
    base = heap.adapters.base(request.model)
    of_model = [status for status in heap.status() if status.backend.name == base]
    remedy = "register one with `prorl backends add` or start `prorl-engine`"
    if not of_model and request.model != POLICY:
        remedy = (
            f"start one with `name = {request.model!r}` in `[[backends]]`, or with `--model-name`; "
            "or name a model of the service in the job's `model` or `models`"
        )
    if not of_model:
        remedy = starts.failures(base) or remedy
    elif behind := [status for status in of_model if status.state == "behind"]:
        remedy = f"backend {behind[0].backend.backend_id} is behind: {behind[0].problem}"
    begun = updates.under_way(request.model)
    if base != request.model:
        remedy = _adapter_remedy(request, of_model) or remedy
    elif begun is not None and any(not one.backend.frozen for one in of_model):
        remedy = f"weights {begun} are on their way, and none serves them yet: let its jobs wait longer"
    what = "inference backend" if request.model == POLICY else f"backend of the model {request.model}"
    has_none = not any(request.pinned in one.backend.adapters.get(request.model, ()) for one in of_model)
    more = {"version_gone": True} if request.pinned is not None and has_none else {}
    within = f" within {request.wait_s:g} s" if request.wait_s else ""
    return NoBackend(
        f"no {what} took job {request.job_id}{within}; {remedy}",
        job_id=request.job_id,
        waited_s=waited_s,
        **more,
    )


def _adapter_remedy(request: Assign, backends: Iterable[BackendStatus]) -> str:
    """Return why backends that are ready do not take a job of an adapter; empty: they do, or none is ready."""
    ready = [one for one in backends if one.state == "ready"]
    if ready and request.pinned is not None:
        return f"none has version {request.pinned} of the adapter, on which its attempt is to end"
    problems = {one.backend.backend_id: one.adapter_problems.get(request.model, "") for one in ready}
    return "; ".join(f"backend {name}: {problem}" for name, problem in problems.items() if problem)
