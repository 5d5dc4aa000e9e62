"""The parts of a rollout's seconds: the stages, and for RUN the timings of its result."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ..wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

OWN_CODE = "own code"
"""The rest of RUN besides its timings: the task's code."""
BACKEND = "backend"
"""The wait for a backend, as in a result's timings."""
ROOM = "room"
"""The wait for room in an engine whose KV cache is full, likewise."""
CLIENT, HANDOVER = "client", "handover"
"""The wait for the client's next submission; the way from one process to the next."""
WAIT = "wait for "
"""Prefix of a stage's name."""
WORKING = (Phase.INIT, Phase.RUN, Phase.EVAL)
"""The stages whose slots do work; those of SCORE only wait."""


def median_parts(each: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each part over some rollouts."""
    return {name: median(parts.get(name, 0.0) for parts in each) for name in {name for parts in each for name in parts}}


def is_work(part: str) -> bool:
    """Return whether a part of a critical path is work, not a wait or overhead."""
    return part not in (CLIENT, HANDOVER) and not part.startswith(WAIT)


def stage_of(part: str) -> str:
    return part if part in (phase.upper() for phase in Phase) else "RUN"


def work_name(part: str) -> str:
    """Return a part's name in a sentence."""
    names = {
        "engine": "engine time",
        "chat": "chat template",
        BACKEND: "the wait for a backend",
        ROOM: "the wait for room",
        OWN_CODE: "RUN's own code",
        CLIENT: "the client",
    }
    return names.get(part, f"tool {part.removeprefix('tool.')}" if part.startswith("tool.") else part)
