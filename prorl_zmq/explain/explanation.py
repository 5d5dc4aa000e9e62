"""`Explanation`: what bounded a run or a batch, as plain data for programs (`prorl explain --json`)."""

from __future__ import annotations

import msgspec

from .suspects import Kind  # noqa: TC001 - msgspec reads the annotations at run time


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, or a possible one."""

    kind: Kind
    name: str
    """Of the stage, tool, task, node, backend or error; a straggler's job id."""
    stage: str = ""
    part: str = ""
    """The part of the work: a stage, `engine`, `tool.bash`, …"""
    evidence: str = ""
    without_s: float = 0.0
    """The length of the replay without it."""
    job_ids: tuple[str, ...] = ()


class StageRow(msgspec.Struct, frozen=True):
    stage: str
    slots: int
    busy: float
    """Slots, on average, as are the next ones."""
    waiting: float
    """Jobs."""
    idle_while_others_waited: float


class PartRow(msgspec.Struct, frozen=True):
    part: str
    path_s: float
    """On the critical path."""
    work_s: float
    """Of all rollouts together."""
    without_s: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    of: str
    took_s: float
    """Up to now, if it is still running."""
    rollouts: int
    finding: Finding
    sentences: tuple[str, ...]
    sureness: str
    """`sure`, `fairly sure` or `not sure`."""
    doubts: tuple[str, ...]
    stages: tuple[StageRow, ...]
    parts: tuple[PartRow, ...]
    others: tuple[Finding, ...]
    """Other causes, the most costly first."""
    critical_jobs: tuple[str, ...]
    notes: tuple[str, ...] = ()
