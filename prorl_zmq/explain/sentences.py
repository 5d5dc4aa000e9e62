"""Words an explanation in three sentences: the cause, the evidence, and the gain without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..system.duration import duration
from .parts import BACKEND, ROOM, is_work, stage_of, work_name

if TYPE_CHECKING:
    from .critical_path import CriticalPath
    from .explanation import Finding
    from .recording import Recording, StageUse


GAIN = 0.15
"""Least share of the time that a named cause must cost."""
LEADING = 0.4
"""Least share of the critical path of a part that is named for it."""
SATURATED = 0.4
"""A stage is short of slots if jobs wait for them for this share of the time."""
HARDLY = 0.5
"""Fewer waiting jobs on average are called "hardly a job"."""


def sentences(
    recording: Recording, of: str, found: Finding, path: CriticalPath, sureness: str, doubts: list[str]
) -> tuple[str, ...]:
    whole = sum(path.parts.values()) or 1.0
    took = duration(recording.wall_s) + (" so far" if recording.now is not None else "")
    because = f", since {' and '.join(doubts)}" if doubts else ""
    if found.kind == "nothing":
        parts = sorted(path.parts.items(), key=lambda one: -one[1])[:3]
        shares = ", ".join(f"{work_name(part)} {seconds / whole:.0%}" for part, seconds in parts)
        return (
            f"Nothing stands out in {of}, which took {took}.",
            f"The largest shares of its critical path are {shares}." if shares else "Its rollouts did no work.",
            f"No node, backend, task, loss, straggler or client costs {GAIN:.0%} of it; this is {sureness}{because}.",
        )
    parts_of_it = path.parts if found.kind != "slots" else {found.part: _of_stage(path, found.stage)}
    share = parts_of_it.get(found.part, 0.0) / whole
    name = found.name
    bounded = {
        "stage": f"{work_name(found.part)} bounded {of}: it is {share:.0%} of the critical path of {took}",
        "slots": f"{name} has too few slots, which bounded {of}: it is {share:.0%} of the critical path of {took}",
        "engine": f"{_engines(found.part)} bounded {of}: it is {share:.0%} of the critical path of {took}",
        "tool": f"The tool {name} bounded {of}: it is {share:.0%} of the critical path of {took}",
        "task": f"The task {name} bounded {of}, which took {took}{_most_of_all(found, share)}",
        "node": f"The node {name} bounded {of}, which took {took}: its {work_name(found.part)} is slow",
        "backend": f"The backend {name} bounded {of}, which took {took}: it is slower than its peers",
        "kv": f"The KV cache of backend {name} bounded {of}, which took {took}: it is too small for its rollouts",
        "losses": f"Lost work bounded {of}, which took {took}: {found.stage} failed with {name}",
        "straggler": f"{_long(len(found.job_ids))} bounded {of}, which took {took}, by {work_name(found.part)}",
        "cold": f"Cold {name}s bounded {of}, which took {took}",
        "client": f"The client bounded {of}, which took {took}: it submitted rollouts too slowly",
    }[found.kind]
    evidence = found.evidence[0].upper() + found.evidence[1:]
    without = f"{duration(found.without_s)} instead of {duration(recording.wall_s)}"
    remedy = {
        "slots": "With as many slots as the largest stage",
        "client": "With all rollouts submitted at the beginning",
        "node": "With that node like its peers",
        "backend": "With that backend like its peers",
        "kv": 'With room for their contexts (fewer slots or `schedule = "kv"`, more engines, or shorter contexts)',
        "task": "With that task like the others",
        "straggler": "With these like the median",
        "losses": "Without the losses",
        "cold": "With these like later ones",
    }.get(found.kind, "Without any of that")
    if found.part == ROOM:
        remedy = "With room for all rollouts (more engines, or shorter contexts)"
    return (f"{bounded}.", f"{evidence}.", f"{remedy}, it would have taken {without}; this is {sureness}{because}.")


def _engines(part: str) -> str:
    whats = {BACKEND: "That no backend was ready", ROOM: "The wait for room in an engine"}
    return whats.get(part, "Engine time")


def _most_of_all(found: Finding, share: float) -> str:
    if share < LEADING:
        return ""
    return f", most of all by {work_name(found.part)}: it is {share:.0%} of the critical path"


def _long(count: int) -> str:
    return "One long rollout" if count == 1 else f"{count} long rollouts"


def _of_stage(path: CriticalPath, stage: str) -> float:
    return sum(seconds for part, seconds in path.parts.items() if is_work(part) and stage_of(part) == stage)


def use_sentence(use: StageUse) -> str:
    if use.waiting >= HARDLY:
        return (
            f"of {use.stage.upper()}'s {use.slots} slots {use.busy:.1f} were busy, while {use.waiting:.1f} jobs waited "
            "for them on average"
        )
    return f"of {use.stage.upper()}'s {use.slots} slots {use.busy:.1f} were busy on average, and hardly a job waited"
