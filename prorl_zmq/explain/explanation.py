"""`explain`: what bounded a run or batch, how sure that is, and what it would have taken without it.

Structural suspects are the parts of the critical path: a stage, the engines, a tool. The others are in `suspects`. For
each the run is replayed without it, and what is saved decides. A cross-cut (a slow node, backend or task, losses, cold
INITs) is named before the leading part if it is a share of that, since it says more. A stage whose slots are few beside those of
the other stages, with jobs waiting for them, is named for its slots. If nothing saves much, nothing stands out.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from ..system.duration import duration
from ..wire.messages.jobs import Outcome, Phase
from .critical_path import critical_path
from .replay import Change, replay
from .rollout import CLIENT, HANDOVER, OWN_CODE
from .suspects import Kind, Suspect, stage_of, suspects

if TYPE_CHECKING:
    from .critical_path import CriticalPath
    from .recording import Recording, StageUse

GAIN = 0.15
"""The least share of the time that something must cost to be named."""
BESIDE = 0.5
"""What is no cross-cut of the leading part is named before it if it saves so much of what the part would."""
LEADING = 0.4
"""The least share of the critical path of a part that is named for it."""
SATURATED = 0.4
"""A stage is short of slots if jobs wait for them during so much of the time."""
FEW_ROLLOUTS, MODEL_ERROR, CLOSE = 10, 0.25, 0.9
"""Below so many rollouts, beyond such an error of the replay, or with a second one that saves so much of what the
first does, an explanation is less sure."""
UNDIVIDED, NOT_COMPLETED = 0.2, 0.1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What bounded it, or may have."""

    kind: Kind
    name: str
    """Of the stage, tool, task, node, backend or error; of a straggler, its job."""
    stage: str = ""
    part: str = ""
    """What of the work: a stage, `engine`, `tool.bash`, …"""
    evidence: str = ""
    without_s: float = 0.0
    """How long it would have taken, replayed without it."""
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
    """So far, if it goes on."""
    rollouts: int
    finding: Finding
    sentences: tuple[str, ...]
    sureness: str
    """`sure`, `fairly sure` or `not sure`."""
    doubts: tuple[str, ...]
    stages: tuple[StageRow, ...]
    parts: tuple[PartRow, ...]
    others: tuple[Finding, ...]
    """What else costs time, the most first."""
    critical_jobs: tuple[str, ...]
    notes: tuple[str, ...] = ()


def explain(recording: Recording, of: str, notes: tuple[str, ...] = ()) -> Explanation:
    """Explain a run of which at least one rollout is known."""
    path = critical_path(recording)
    replayed_s = replay(recording)
    calibration = recording.wall_s / replayed_s if replayed_s > 0 else 1.0
    structural = _structural(recording, path)
    others = suspects(recording)
    gains = {id(one): replayed_s - replay(recording, one.change) for one in (*structural.values(), *others)}

    def finding(suspect: Suspect) -> Finding:
        without_s = max(0.0, replayed_s - gains[id(suspect)]) * calibration
        return Finding(
            kind=suspect.kind,
            name=suspect.name,
            stage=suspect.stage,
            part=suspect.part,
            evidence=suspect.evidence,
            without_s=without_s,
            job_ids=suspect.job_ids,
        )

    leading = max(structural.values(), key=lambda one: path.parts[one.part], default=None)
    chosen = _chosen(leading, others, gains, replayed_s, path)
    ranked = sorted((one for one in others if gains[id(one)] >= GAIN * replayed_s), key=lambda one: -gains[id(one)])
    rivals = [one for one in ranked if one is not chosen]
    doubts = _doubts(recording, calibration, chosen, rivals, gains)
    named = finding(chosen) if chosen is not None else Finding(kind="nothing", name="nothing")
    sureness = ("sure", "fairly sure", "not sure")[min(len(doubts), 2)]
    return Explanation(
        of=of,
        took_s=recording.wall_s,
        rollouts=len(recording.rollouts),
        finding=named,
        sentences=_sentences(recording, of, named, path, sureness, doubts),
        sureness=sureness,
        doubts=tuple(doubts),
        stages=tuple(_stage_row(use) for use in recording.use.values()),
        parts=_part_rows(recording, path, {part: finding(one).without_s for part, one in structural.items()}),
        others=tuple(map(finding, rivals)),
        critical_jobs=tuple(path.job_ids[:8]),
        notes=(*notes, *_notes(recording)),
    )


def _structural(recording: Recording, path: CriticalPath) -> dict[str, Suspect]:
    found = {}
    for part in path.parts:
        if part in (CLIENT, HANDOVER):
            continue
        stage = stage_of(part)
        use = recording.use[Phase(stage.lower())]
        most = max(other.slots for other in recording.use.values())
        change = Change(lambda _rollout, _work, each, part=part: 0.0 if each == part else 1.0)
        kind: Kind = "engine" if part == "engine" else "tool" if part.startswith("tool.") else "stage"
        name = part.removeprefix("tool.") if kind != "stage" else stage
        if use.waiting_share >= SATURATED and 2 * use.slots <= most:
            kind, name = "slots", stage
            change = Change(slots={use.stage: most / use.slots})
        found[part] = Suspect(kind, name, _use(use), change, stage=stage, part=part)
    return found


def _chosen(
    leading: Suspect | None, others: list[Suspect], gains: dict[int, float], replayed_s: float, path: CriticalPath
) -> Suspect | None:
    """Return the suspect to name; None: nothing stands out."""
    least_s = GAIN * replayed_s
    leads = leading is not None and path.parts[leading.part] >= LEADING * sum(path.parts.values())
    part_s = gains[id(leading)] if leading is not None and leads else 0.0
    rival_s = max(least_s, BESIDE * part_s)
    likely = [one for one in others if gains[id(one)] >= (least_s if _refines(one, leading) else rival_s)]
    if likely:
        most_s = max(gains[id(one)] for one in likely)
        return next(one for one in likely if gains[id(one)] >= CLOSE * most_s)  # the most telling comes first
    return leading if leads and part_s >= least_s else None


def _refines(suspect: Suspect, leading: Suspect | None) -> bool:
    """Return whether a suspect says which share of the leading part is too much."""
    named = suspect.part or suspect.stage
    return suspect.cross_cut and leading is not None and named in (leading.part, leading.stage)


def _doubts(
    recording: Recording,
    calibration: float,
    chosen: Suspect | None,
    rivals: list[Suspect],
    gains: dict[int, float],
) -> list[str]:
    doubts = []
    if len(recording.rollouts) < FEW_ROLLOUTS:
        doubts.append(f"only {len(recording.rollouts)} rollouts are known")
    if abs(1 - calibration) > MODEL_ERROR:
        doubts.append(f"the replay of the recorded times takes {1 / calibration:.0%} of the real time")
    undivided = sum(not one.divided for one in recording.rollouts) / len(recording.rollouts)
    if undivided > UNDIVIDED:
        doubts.append(f"of {undivided:.0%} of the rollouts it is not known what RUN did")
    if any(one.left_out for one in recording.rollouts):
        doubts.append("some traces have lost their middle")
    if chosen is not None and rivals and gains[id(rivals[0])] >= CLOSE * gains[id(chosen)]:
        doubts.append(f"{rivals[0].kind} {rivals[0].name} costs about as much")
    return doubts


def _sentences(
    recording: Recording, of: str, found: Finding, path: CriticalPath, sureness: str, doubts: list[str]
) -> tuple[str, ...]:
    whole = sum(path.parts.values()) or 1.0
    took = duration(recording.wall_s) + (" so far" if recording.now is not None else "")
    because = f", since {' and '.join(doubts)}" if doubts else ""
    if found.kind == "nothing":
        parts = sorted(path.parts.items(), key=lambda one: -one[1])[:3]
        shares = ", ".join(f"{_called(part)} {seconds / whole:.0%}" for part, seconds in parts)
        return (
            f"Nothing stands out in {of}, which took {took}.",
            f"The largest shares of its critical path are {shares}.",
            f"No slow node, backend or task, no loss, straggler or client costs {GAIN:.0%} of the time; "
            f"this is {sureness}{because}.",
        )
    share = path.parts.get(found.part, 0.0) / whole
    name = found.name
    bounded = {
        "stage": f"{name} bounded {of}: it is {share:.0%} of the critical path of {took}",
        "slots": f"{name} has too few slots, which bounded {of}: it is {share:.0%} of the critical path of {took}",
        "engine": f"The engines bounded {of}: waiting for them is {share:.0%} of the critical path of {took}",
        "tool": f"The tool {name} bounded {of}: it is {share:.0%} of the critical path of {took}",
        "task": f"The task {name} bounded {of}, which took {took}, most of all by its {_called(found.part)}",
        "node": f"The node {name} bounded {of}, which took {took}: its {_called(found.part)} is slow",
        "backend": f"The backend {name} bounded {of}, which took {took}: it is slower than its peers",
        "losses": f"Lost work bounded {of}, which took {took}: {found.stage} failed with {name}",
        "straggler": f"{len(found.job_ids)} long rollouts bounded {of}, which took {took}, by {_called(found.part)}",
        "cold": f"Cold INITs bounded {of}, which took {took}",
        "client": f"The client bounded {of}, which took {took}: it submitted rollouts too slowly",
    }[found.kind]
    evidence = found.evidence[0].upper() + found.evidence[1:]
    without = f"{duration(found.without_s)} instead of {duration(recording.wall_s)}"
    remedy = {
        "slots": "With as many slots as the largest stage",
        "client": "With all rollouts submitted at the beginning",
        "node": "With that node like its peers",
        "backend": "With that backend like its peers",
        "task": "With that task like the others",
        "straggler": "With these like the median",
        "losses": "Without the losses",
        "cold": "With these like later ones",
    }.get(found.kind, "Without any of that")
    return (f"{bounded}.", f"{evidence}.", f"{remedy}, it would have taken {without}; this is {sureness}{because}.")


def _use(use: StageUse) -> str:
    if use.waiting_share >= SATURATED:
        return (
            f"of {use.stage.upper()}'s {use.slots} slots {use.busy:.1f} were busy, while {use.waiting:.1f} jobs waited "
            "for them on average"
        )
    return f"of {use.stage.upper()}'s {use.slots} slots {use.busy:.1f} were busy on average, and hardly a job waited"


def _called(part: str) -> str:
    return {"engine": "engine time", OWN_CODE: "RUN's own code", CLIENT: "the client"}.get(
        part, f"tool {part.removeprefix('tool.')}" if part.startswith("tool.") else part
    )


def _stage_row(use: StageUse) -> StageRow:
    return StageRow(use.stage.upper(), use.slots, use.busy, use.waiting, use.idle_while_others_waited)


def _part_rows(recording: Recording, path: CriticalPath, without_s: dict[str, float]) -> tuple[PartRow, ...]:
    totals: Counter[str] = Counter()
    for work in recording.works:
        totals.update(work.parts)
    rows = [
        PartRow(_called(part), path.parts.get(part, 0.0), totals[part], without_s.get(part, recording.wall_s))
        for part in {*totals, *path.parts}
    ]
    return tuple(sorted(rows, key=lambda row: (-row.path_s, -row.work_s)))


def _notes(recording: Recording) -> tuple[str, ...]:
    ended = [one for one in recording.rollouts if one.outcome is not None]
    bad = Counter((one.outcome, one.code) for one in ended if one.outcome != Outcome.COMPLETED)
    notes = [
        f"{count} of {len(ended)} rollouts ended as {outcome}" + (f" ({code})" if code else "")
        for (outcome, code), count in bad.most_common(2)
        if count >= NOT_COMPLETED * len(ended)
    ]
    for use in recording.use.values():
        if use.waiting_share >= SATURATED and use.busy_while_waiting < 0.8 * use.slots and len(recording.slots) <= 3:
            notes.append(
                f"while these jobs waited for {use.stage.upper()}, they held {use.busy_while_waiting:.1f} of its "
                f"{use.slots} slots: others had the rest, or some were not there all the time"
            )
    return tuple(notes)
