"""Decodes a packed history into a job's spans or one line of a table. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import ErrorInfo
from ...wire.messages.front_door import JobTrace, Span
from ...wire.messages.jobs import Phase
from ...wire.messages.watching import JobRow
from .transitions import (
    LeftOut,
    OfModel,
    Recovered,
    ToBackend,
    ToClient,
    ToEnd,
    ToQueue,
    ToStage,
    Traced,
    contents,
    first,
    read,
)

if TYPE_CHECKING:
    from .transitions import Transition

OF_THE_END = ("task", "group_id", "outcome", "reward", "stop_reason", "tokens", "turns")


class _Spans:
    def __init__(self, began: float) -> None:
        self.all: list[dict[str, Any]] = []
        """The fields of each `Span`."""
        self._began = began
        self._last_s = 0.0

    def seconds(self, at: float) -> float:
        """Return the seconds since acceptance, never decreasing even if the clock was set back."""
        self._last_s = max(self._last_s, at - self._began)
        return self._last_s

    def enter(self, now_s: float, error: ErrorInfo | None, item: ToQueue | ToStage, **place: str) -> None:
        self.leave(now_s, error)
        self.all.append({"phase": item.phase, "attempt": item.attempt, "start_s": now_s, "backends": (), **place})

    def leave(self, now_s: float, error: ErrorInfo | None = None) -> None:
        if self.all and "end_s" not in self.all[-1]:
            self.all[-1] |= {"end_s": now_s, "error": error}

    def assign(self, backend: str, attempt: int | None = None) -> None:
        """Add a backend to the last span held in RUN, if that is of the attempt."""
        run = next((one for one in reversed(self.all) if (one["phase"], one["place"]) == (Phase.RUN, "held")), None)
        if run is not None and attempt in (None, run["attempt"]) and backend not in run["backends"]:
            run["backends"] += (backend,)


def job_trace(request_id: str, job_id: str, packed: bytes, at: float) -> JobTrace:
    """Return a job's trace until `at`."""
    items: list[Transition] = [*read(packed)] or [LeftOut(at, 1)]
    spans = _Spans(items[0].at)
    known: dict[str, Any] = {}
    restarts: list[float] = []
    for item in items:
        now_s = spans.seconds(item.at)
        match item:
            case ToQueue():
                spans.enter(now_s, _error(item), item, place="queued")
            case ToStage():
                spans.enter(now_s, None, item, place="held", stage_id=item.stage_id, node=item.node)
            case ToBackend():
                spans.assign(item.backend, item.attempt)
            case ToEnd():
                error = _error(item)
                if item.backend:
                    spans.assign(item.backend)
                spans.leave(now_s, error)
                known |= {name: getattr(item, name) for name in OF_THE_END} | {"error": error, "ended_s": now_s}
            case ToClient():
                known["collected_s"] = now_s
            case Traced():
                known |= {"traceparent": item.traceparent, "parent_span": item.parent_span}
            case OfModel():
                known["model"] = item.model
            case Recovered():
                restarts.append(now_s)
            case LeftOut():
                known["left_out"] = item.items
                spans.leave(now_s)
    return JobTrace(
        request_id,
        job_id=job_id,
        accepted_at=items[0].at,
        age_s=spans.seconds(at),
        spans=tuple(Span(**one) for one in spans.all),
        restarts=tuple(restarts),
        **known,
    )


def job_row(job_id: str, packed: bytes, task: str, group_id: str) -> JobRow | None:
    """Return a job's line, with the names of an ended job from its history; None if the history is unreadable.

    Only the transitions that a line needs are decoded: an answer has up to 2000 lines.
    """
    items = contents(packed)
    newest = items[::-1]
    began, now = first(items, ToQueue, ToStage), first(newest, ToQueue, ToStage)
    if began is None or now is None:
        return None
    stage, queue = first(newest, ToStage), first(newest, ToQueue)
    backend, end, named = first(newest, ToBackend), first(newest, ToEnd), first(items[:2], OfModel)
    row = JobRow(
        job_id=job_id,
        task=task,
        group_id=group_id,
        phase=now.phase,
        place="held" if isinstance(now, ToStage) else "queued",
        attempt=now.attempt,
        accepted_at=began.at,
        entered_at=now.at,
        node=stage.node if stage is not None else "",
        stage_id=stage.stage_id if stage is not None else "",
        backend=backend.backend if backend is not None else "",
        code=queue.code if queue is not None else "",
        model=named.model if named is not None else "",
    )
    if end is None:
        return row
    return msgspec.structs.replace(
        row,
        task=end.task,
        group_id=end.group_id,
        place="ended",
        entered_at=end.at,
        ended_at=end.at,
        backend=end.backend or row.backend,
        outcome=end.outcome,
        code=end.code,
        reward=end.reward,
        tokens=end.tokens,
        turns=end.turns,
    )


def _error(item: ToQueue | ToEnd) -> ErrorInfo | None:
    return ErrorInfo(item.code, item.message) if item.code else None
