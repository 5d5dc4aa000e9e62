"""What each job went through, for `prorl job`: the states it was in, where, how long, and what ended each attempt.

Fed with the job table's actions and the time of the broker's own wall clock; decides nothing. A history is one value of
bytes that only grows, MessagePack items one behind another: cheap to add to (measured: 1 to 3 µs), and kept by the
journal unchanged. It is read only when a client asks. Histories of jobs that have not ended are as many as those; of
ended ones the newest are kept, bounded in number and bytes. A history that grows too long loses its middle.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec

from ...errors import ErrorInfo, UnknownJob
from ...wire.messages.front_door import JobTrace, Span
from ...wire.messages.jobs import Phase
from .actions import End, Queued, Start
from .history_items import (
    READ_BYTES,
    AssignedItem,
    CollectedItem,
    EndedItem,
    HeldItem,
    Item,
    LeftOutItem,
    QueuedItem,
    TakenUpItem,
    TracedItem,
    read_items,
)
from .job_changes import JobChanges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .actions import Action

ENDED_LIMIT = 10_000
"""Histories of ended jobs that are kept."""
ENDED_LIMIT_BYTES = 16 * 2**20
"""How much memory those may take, about."""
JOB_LIMIT_BYTES = 8192
"""Longest history of one job; its middle goes."""
MESSAGE_LIMIT = 300
"""Most characters of an error's message in a history."""
NAME_LIMIT = 128
ENTRY_BYTES = 300
"""What an ended job's history takes beside its bytes: its id, and its place in the table."""
MATCHES = 4
"""Most ids that an ambiguous request is answered with."""


_encode = msgspec.msgpack.Encoder().encode


class JobHistory:
    """The histories of the jobs that have not ended, and of those that ended last."""

    def __init__(self, ended_limit: int = ENDED_LIMIT, ended_limit_bytes: int = ENDED_LIMIT_BYTES) -> None:
        self._ended_limit = ended_limit
        self._ended_limit_bytes = ended_limit_bytes
        self._live: dict[str, bytes] = {}
        self._ended: OrderedDict[str, bytes] = OrderedDict()
        self._ended_bytes = 0
        self.changes = JobChanges()
        self._backends: dict[str, tuple[int, str]] = {}
        """What was last noted of jobs in RUN, since each report says it again."""
        self._addresses: dict[str, tuple[int, str]] = {}
        """Of rollouts that programs outside lead, with their attempts. Reports say them again after a restart."""

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def packed(self, job_id: str) -> bytes:
        """Return a job's history as the journal keeps it; nothing if it is not known."""
        return self._live.get(job_id) or self._ended.get(job_id, b"")

    def restore(self, job_id: str, packed: bytes, at: float) -> None:
        """Take up what the journal kept of a job that has not ended, and note that the broker was restarted."""
        self._live[job_id] = _undamaged(packed, at) + _encode(TakenUpItem(at))
        self.changes.note(job_id)

    def restore_ended(self, job_id: str, packed: bytes) -> None:
        """Take up what the journal kept of a job that has ended, if that can be read."""
        if packed := _undamaged(packed, None):
            self._live[job_id] = packed
            self.changes.note(job_id)
            self._end(job_id)

    # Events -----------------------------------------------------------------------------------------------------------

    def note(self, action: Action, at: float, node: str = "") -> None:
        """Note what the job table decided; `node` is that of the stage process which a phase was given to."""
        match action:
            case Queued():
                code, message = _error(action.error)
                self._addresses.pop(action.job_id, None)
                if action.phase == Phase.EVAL:
                    self._addresses[action.job_id] = (0, "")  # there will be none any more
                self._add(action.job_id, QueuedItem(at, action.attempt, action.phase, code, message))
            case Start():
                command = action.command
                self._add(command.job_id, HeldItem(at, command.attempt, command.phase, action.stage_id, node))
            case End():
                result = action.finished.result
                code, message = _error(result.error)
                ended = EndedItem(
                    at,
                    result.task,
                    result.group_id,
                    result.outcome,
                    result.reward,
                    result.stop_reason[:NAME_LIMIT],
                    result.tokens,
                    result.turns,
                    result.backend[:NAME_LIMIT],
                    code,
                    message,
                )
                self._add(result.job_id, ended)
                self._end(result.job_id)

    def traced(self, job_id: str, traceparent: str, parent_span: str, at: float) -> None:
        """Note the trace that a new job is in, before anything else of it."""
        self._add(job_id, TracedItem(at, traceparent, parent_span))

    def assigned(self, job_id: str, attempt: int, backend: str, at: float) -> None:
        """Note the backend of an attempt's RUN; said again, it changes nothing."""
        if job_id in self._live and self._backends.get(job_id) != (attempt, backend):
            self._backends[job_id] = (attempt, backend)
            self._add(job_id, AssignedItem(at, attempt, backend[:NAME_LIMIT]))

    def opened(self, addresses: Mapping[str, tuple[int, str]]) -> None:
        """Note where programs outside reach the RUNs of attempts."""
        self._addresses.update((job_id, where) for job_id, where in addresses.items() if job_id in self._live)

    def collected(self, job_ids: Iterable[str], at: float) -> None:
        added = _encode(CollectedItem(at))
        for job_id in job_ids:
            if job_id in self._ended:
                self._ended[job_id] += added
                self._ended_bytes += len(added)

    def _add(self, job_id: str, item: Item) -> None:
        before = self._live.get(job_id)
        if before is None:
            self._forget(job_id)  # the id of an ended job may come again
            self._live[job_id] = _encode(item)
        elif len(before) < JOB_LIMIT_BYTES:
            self._live[job_id] = before + _encode(item)
        else:
            self._live[job_id] = _without_middle(before) + _encode(item)
        self.changes.note(job_id)

    def _end(self, job_id: str) -> None:
        self._forget(job_id)
        packed = self._live.pop(job_id)
        self._backends.pop(job_id, None)
        self._addresses.pop(job_id, None)
        self._ended[job_id] = packed
        self._ended_bytes += len(packed) + ENTRY_BYTES
        while len(self._ended) > self._ended_limit or self._ended_bytes > self._ended_limit_bytes:
            oldest = next(iter(self._ended))
            self._forget(oldest)
            self.changes.forget(oldest)

    def _forget(self, job_id: str) -> None:
        packed = self._ended.pop(job_id, None)
        if packed is not None:
            self._ended_bytes -= len(packed) + ENTRY_BYTES

    # Questions --------------------------------------------------------------------------------------------------------

    def find(self, beginning: str) -> str:
        """Return the id of the one job whose id is `beginning`, or begins so.

        Raises:
            UnknownJob: there is none, or more than one.
        """
        if beginning in self._live or beginning in self._ended:
            return beginning
        found = [job_id for ids in (self._live, self._ended) for job_id in ids if job_id.startswith(beginning)]
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(found[:MATCHES]) + (", …" if len(found) > MATCHES else "")
            message = f"{len(found)} jobs have an id that begins with {beginning}: {some}; give more of it"
        else:
            message = (
                f"no job {beginning}: it was never submitted here, or it ended so long ago that it is forgotten "
                f"(the newest {self._ended_limit} are remembered, and none over a restart once they were collected)"
            )
        raise UnknownJob(message, job_id=beginning, matches=len(found))

    def waits_for_address(self, job_id: str) -> bool:
        """Return whether a known job has not ended and has no address."""
        return job_id in self._live and job_id not in self._addresses

    def traceparent(self, job_id: str) -> str:
        """Return the trace context of a known job; empty: it is not traced."""
        first = next(read_items(self.packed(job_id)), None)
        return first.traceparent if isinstance(first, TracedItem) else ""

    def trace(self, request_id: str, job_id: str, at: float) -> JobTrace:
        """Tell what a known job went through until now."""
        trace = read_history(request_id, job_id, self.packed(job_id), at)
        attempt, address = self._addresses.get(job_id, (0, ""))
        now = trace.spans[-1] if trace.spans else None
        if now is None or (now.phase, now.place, now.attempt) != (Phase.RUN, "held", attempt):
            return trace
        return msgspec.structs.replace(trace, address=address)


def read_history(request_id: str, job_id: str, packed: bytes, at: float) -> JobTrace:
    """Tell what a job went through until `at`, as its packed history has it."""
    return _trace(request_id, job_id, list(read_items(packed)) or [LeftOutItem(at, 1)], at)


class _Story:
    def __init__(self, began: float) -> None:
        self.spans: list[Span] = []
        self._began = began
        self._last_s = 0.0

    def seconds(self, at: float) -> float:
        """Return how long after the job's acceptance something was; a clock that was set back stands still here."""
        self._last_s = max(self._last_s, at - self._began)
        return self._last_s

    def enter(self, now_s: float, error: ErrorInfo | None, /, **state: Any) -> None:
        self.leave(now_s, error)
        self.spans.append(Span(start_s=now_s, **state))

    def leave(self, now_s: float, error: ErrorInfo | None = None) -> None:
        if self.spans and self.spans[-1].end_s is None:
            self.spans[-1] = msgspec.structs.replace(self.spans[-1], end_s=now_s, error=error)

    def assign(self, backend: str, attempt: int | None = None) -> None:
        """Add a backend to the last span in RUN, if that is of the attempt."""
        for index in reversed(range(len(self.spans))):
            span = self.spans[index]
            if span.phase == Phase.RUN and span.place == "held":
                if attempt in (None, span.attempt) and backend not in span.backends:
                    self.spans[index] = msgspec.structs.replace(span, backends=(*span.backends, backend))
                return


def _trace(request_id: str, job_id: str, items: list[Any], at: float) -> JobTrace:
    story = _Story(items[0].at)
    told: dict[str, Any] = {}
    restarts: list[float] = []
    left_out = 0
    for item in items:
        now_s = story.seconds(item.at)
        match item:
            case QueuedItem():
                story.enter(now_s, _info(item), phase=item.phase, place="queued", attempt=item.attempt)
            case HeldItem():
                where = {"stage_id": item.stage_id, "node": item.node}
                story.enter(now_s, None, phase=item.phase, place="held", attempt=item.attempt, **where)
            case AssignedItem():
                story.assign(item.backend, item.attempt)
            case EndedItem():
                error = _info(item)
                if item.backend:
                    story.assign(item.backend)
                story.leave(now_s, error)
                names = ("task", "group_id", "outcome", "reward", "stop_reason", "tokens", "turns")
                told |= {name: getattr(item, name) for name in names}
                told |= {"error": error, "ended_s": now_s}
            case CollectedItem():
                told["collected_s"] = now_s
            case TracedItem():
                told |= {"traceparent": item.traceparent, "parent_span": item.parent_span}
            case TakenUpItem():
                restarts.append(now_s)
            case LeftOutItem():
                left_out = item.items
                story.leave(now_s)
    return JobTrace(
        request_id,
        job_id=job_id,
        accepted_at=items[0].at,
        age_s=story.seconds(at),
        spans=tuple(story.spans),
        restarts=tuple(restarts),
        left_out=left_out,
        **told,
    )


def _undamaged(packed: bytes, at: float | None) -> bytes:
    """Return a history unchanged, or up to where it cannot be read, with a mark of that time behind it."""
    unpacker = msgpack.Unpacker(read_size=READ_BYTES, max_buffer_size=0)
    unpacker.feed(packed)
    whole = 0
    try:
        while whole < len(packed):
            unpacker.skip()
            whole = unpacker.tell()
    except (ValueError, msgpack.UnpackException):
        return packed[:whole] + (_encode(LeftOutItem(at, 1)) if at is not None else b"")
    return packed


def _without_middle(packed: bytes) -> bytes:
    """Keep the first and the last items of a history, a quarter of the limit each."""
    items = list(read_items(packed))
    sizes = [len(_encode(item)) for item in items]
    head, tail = 0, len(items)
    while head < tail and not isinstance(items[head], LeftOutItem) and sum(sizes[: head + 1]) <= JOB_LIMIT_BYTES // 4:
        head += 1
    while head < tail and sum(sizes[tail - 1 :]) <= JOB_LIMIT_BYTES // 4:
        tail -= 1
    gone = items[head:tail]
    if not gone:  # most of it cannot be read
        return b"".join(map(_encode, items))
    left_out = sum(item.items if isinstance(item, LeftOutItem) else 1 for item in gone)
    kept = [*items[:head], LeftOutItem(gone[-1].at, left_out), *items[tail:]]
    return b"".join(map(_encode, kept))


def _error(error: ErrorInfo | None) -> tuple[str, str]:
    return ("", "") if error is None else (error.code[:NAME_LIMIT], error.message[:MESSAGE_LIMIT])


def _info(item: QueuedItem | EndedItem) -> ErrorInfo | None:
    return ErrorInfo(item.code, item.message) if item.code else None
