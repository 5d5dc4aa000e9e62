"""Count a phase when it ends, from the event that reports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..metrics import catalog
from ..metrics.metric import Metric
from ..wire.messages.jobs import Phase
from ..wire.messages.stages import PhaseFailed

if TYPE_CHECKING:
    from ..wire.messages.stages import PhaseDone


def count_phase(task: str, event: PhaseDone | PhaseFailed) -> None:
    if not Metric.counting:
        return
    catalog.PHASE_SECONDS.observe(event.timings.get(event.phase, 0.0), event.phase, task)
    if isinstance(event, PhaseFailed):
        catalog.PHASE_FAILURES.add(event.phase, task, event.error.code)
    if event.phase != Phase.RUN:
        return
    metrics = event.metrics
    catalog.TURNS.add(task, amount=metrics.get("turns", 0.0))
    catalog.TOOL_CALLS_MALFORMED.add(task, amount=metrics.get("malformed_tool_calls", 0.0))
    for kind in ("prompt", "cached", "generated"):
        catalog.TOKENS.add(task, kind, amount=metrics.get(f"{kind}_tokens", 0.0))
