"""`diagnose`: finds what bounded a run or batch, how sure that is, and how long it would have taken without it.

Structural suspects are the parts of the critical path: a stage, the engines, a tool; `suspects` finds the others. The
run is replayed without each suspect, and the saved time decides. A cross-cut (a slow node, backend or task, a small KV
cache, losses, cold INITs or RUNs) is named before the leading part that contains it, since it says more. A stage is
named for its slots if it has few and jobs wait for them. A part that leads the critical path is named even if the
replay saves little without it, with that doubt.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..wire.messages.jobs import Outcome, Phase
from .critical_path import critical_path
from .explanation import Explanation, Finding, PartRow, StageRow
from .parts import BACKEND, ROOM, WORKING, is_work, stage_of, work_name
from .replay import Change, replay
from .sentences import GAIN, LEADING, SATURATED, sentences, use_sentence
from .suspects import Kind, Suspect, suspects

if TYPE_CHECKING:
    from .critical_path import CriticalPath
    from .recording import Recording, StageUse
    from .rollout import Rollout, Work

BESIDE = 0.5
"""A suspect outside the leading part is named before it if it saves this share of the part's saving; a doubtful one
must save as much."""
CLOSE = 0.9
"""Among suspects that save at least this share of the best saving, the most telling is named."""
FEW_ROLLOUTS, MODEL_ERROR, RIVAL = 10, 0.25, 0.75
"""An explanation is less sure below so many rollouts, beyond this error of the replay, or with a rival that saves this
share."""
UNDIVIDED = 0.2
"""Share of rollouts with unknown parts of RUN beyond which an explanation is less sure."""
NOT_COMPLETED, LACKING = 0.1, 0.8
"""Shares that are worth a note: of rollouts with one bad outcome, and of a stage's slots that these rollouts had."""
NOT_NOTHING = 0.3
"""Share of the critical path in one part beyond which "nothing stands out" is less sure."""
SURENESS = ("sure", "fairly sure", "not sure")
"""With no doubt, one, and more."""
SHOWN_JOBS = 8


class _Weighed(NamedTuple):
    suspect: Suspect
    saves_s: float
    """How much shorter the replay without it is."""


def diagnose(recording: Recording, of: str, notes: tuple[str, ...] = ()) -> Explanation:
    """Explain a run with at least one known rollout; `of` is its name in a sentence."""
    path = critical_path(recording)
    replayed_s = replay(recording)
    calibration = recording.wall_s / replayed_s if replayed_s > 0 else 1.0

    def weighed(suspect: Suspect) -> _Weighed:
        return _Weighed(suspect, max(0.0, replayed_s - replay(recording, suspect.change)))

    def without_s(one: _Weighed) -> float:
        return (replayed_s - one.saves_s) * calibration

    def finding(one: _Weighed) -> Finding:
        suspect = one.suspect
        return Finding(
            kind=suspect.kind,
            name=suspect.name,
            stage=suspect.stage,
            part=suspect.part,
            evidence=suspect.evidence,
            without_s=without_s(one),
            job_ids=suspect.job_ids,
        )

    def weighed_part(part: str) -> _Weighed:
        found = [weighed(suspect) for suspect in _structural(recording, part)]
        return next((one for one in found if one.saves_s >= GAIN * replayed_s), found[-1])

    structural = {part: weighed_part(part) for part in path.parts if is_work(part)}
    others = [weighed(suspect) for suspect in suspects(recording)]
    chosen = _chosen(structural, others, replayed_s, path)
    rivals = [one for one in others if one.saves_s >= GAIN * replayed_s > 0 and one is not chosen]
    rivals.sort(key=lambda one: -one.saves_s)
    parts = list(structural.values())
    doubts = _doubts(recording, calibration, chosen, [*rivals, *(parts if chosen in parts else ())])
    doubts += _unearned(chosen, replayed_s, path)
    named = finding(chosen) if chosen is not None else Finding(kind="nothing", name="nothing")
    sureness = SURENESS[min(len(doubts), len(SURENESS) - 1)]
    return Explanation(
        of=of,
        took_s=recording.wall_s,
        rollouts=len(recording.rollouts),
        finding=named,
        sentences=sentences(recording, of, named, path, sureness, doubts),
        sureness=sureness,
        doubts=tuple(doubts),
        stages=tuple(_stage_row(use) for use in recording.use.values() if use.slots or use.stage != Phase.SCORE),
        parts=_part_rows(recording, path, {part: without_s(one) for part, one in structural.items()}),
        others=tuple(map(finding, rivals)),
        critical_jobs=tuple(path.job_ids[:SHOWN_JOBS]),
        notes=(*notes, *_notes(recording)),
    )


def _structural(recording: Recording, part: str) -> tuple[Suspect, ...]:
    """Return the suspects for a part of the critical path, before it its stage's slots if they are few."""
    stage = stage_of(part)
    use = recording.use[Phase(stage.lower())]
    most = max(other.slots for other in recording.use.values() if other.stage in (use.stage, *WORKING))
    kind: Kind = "engine" if part in ("engine", BACKEND, ROOM) else "tool" if part.startswith("tool.") else "stage"
    name = part.removeprefix("tool.") if kind != "stage" else stage  # `engine`, or that none is ready or has room
    evidence = (
        use_sentence(use)
        if part != ROOM
        else "rollouts waited until others ended, since no ready engine took more (see `prorl backends list`)"
    )
    itself = Suspect(kind, name, evidence, Change(partial(_without, part)), stage=stage, part=part)
    if use.waiting_share < SATURATED or 2 * use.slots > most:
        return (itself,)
    more = Change(slots={use.stage: most / use.slots})
    return Suspect("slots", stage, use_sentence(use), more, stage=stage, part=part), itself


def _without(gone: str, _rollout: Rollout, _work: Work, part: str) -> float:
    return 0.0 if part == gone else 1.0


def _chosen(
    structural: dict[str, _Weighed], others: list[_Weighed], replayed_s: float, path: CriticalPath
) -> _Weighed | None:
    """Return the suspect to name; None: nothing stands out."""
    least_s = GAIN * replayed_s
    if replayed_s <= 0:
        return None
    leading = max(structural.values(), key=lambda one: path.parts[one.suspect.part], default=None)
    if leading is not None and path.parts[leading.suspect.part] < LEADING * sum(path.parts.values()):
        leading = None
    rival_s = max(least_s, BESIDE * leading.saves_s) if leading is not None else least_s

    def enough_s(one: _Weighed) -> float:
        if leading is None or _refines(one, leading):
            return least_s
        return max(rival_s, leading.saves_s) if one.suspect.doubt else rival_s

    whole = sum(path.parts.values())
    likely = [one for one in others if one.saves_s >= enough_s(one) and not _is_aside(one, path, whole)]
    if likely:
        most_s = max(one.saves_s for one in likely)
        return next(one for one in likely if one.saves_s >= CLOSE * most_s)  # the most telling comes first
    return leading


def _is_aside(one: _Weighed, path: CriticalPath, whole: float) -> bool:
    """Return whether a slow task is slow in a part that is hardly in the critical path."""
    return one.suspect.kind == "task" and path.parts.get(one.suspect.part, 0.0) < GAIN * whole


def _unearned(chosen: _Weighed | None, replayed_s: float, path: CriticalPath) -> list[str]:
    """Return the doubts from a disagreement of replay and critical path."""
    if chosen is not None:
        small = chosen.saves_s < GAIN * replayed_s
        return ["without it other work would have taken most of its time"] if small else []
    part, part_s = max(path.parts.items(), key=lambda one: one[1], default=("", 0.0))
    share = part_s / (sum(path.parts.values()) or 1.0)
    return [f"{work_name(part)} is {share:.0%} of its critical path"] if share >= NOT_NOTHING else []


def _refines(one: _Weighed, leading: _Weighed) -> bool:
    """Return whether a suspect is a cross-cut of the leading part."""
    named = one.suspect.part or one.suspect.stage
    return one.suspect.cross_cut and named in (leading.suspect.part, leading.suspect.stage)


def _doubts(recording: Recording, calibration: float, chosen: _Weighed | None, rivals: list[_Weighed]) -> list[str]:
    rollouts = recording.rollouts
    doubts = []
    if len(rollouts) < FEW_ROLLOUTS:
        doubts.append("only one rollout is known" if len(rollouts) == 1 else f"only {len(rollouts)} rollouts are known")
    if abs(1 - calibration) > MODEL_ERROR:
        doubts.append(f"the replay of the recorded times takes {1 / calibration:.0%} of the real time")
    undivided = sum(not one.divided and one.has_run for one in rollouts) / len(rollouts)
    if undivided > UNDIVIDED:
        doubts.append(f"of {undivided:.0%} of the rollouts it is not known what RUN did")
    if any(one.left_out for one in rollouts):
        doubts.append("some traces have lost their middle")
    if chosen is None:
        return doubts
    if chosen.suspect.doubt:
        doubts.append(chosen.suspect.doubt)
    named = chosen.suspect.kind, chosen.suspect.name
    others = [one for one in rivals if (one.suspect.kind, one.suspect.name) != named]
    rival = max(others, key=lambda one: one.saves_s, default=None)
    if rival is not None and rival.saves_s >= RIVAL * chosen.saves_s:
        doubts.append(f"{_label(rival.suspect)} costs about as much")
    return doubts


def _label(suspect: Suspect) -> str:
    if suspect.kind == "kv":
        return f"the KV cache of backend {suspect.name}"
    return work_name(suspect.part) if suspect.kind in ("stage", "engine", "tool") else f"{suspect.kind} {suspect.name}"


def _stage_row(use: StageUse) -> StageRow:
    return StageRow(use.stage.upper(), use.slots, use.busy, use.waiting, use.idle_while_others_waited)


def _part_rows(recording: Recording, path: CriticalPath, without_s: dict[str, float]) -> tuple[PartRow, ...]:
    totals: Counter[str] = Counter()
    for work in recording.works:
        totals.update(work.parts)
    rows = [
        PartRow(work_name(part), path.parts.get(part, 0.0), totals[part], without_s.get(part, recording.wall_s))
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
    notes += [_none(use) for use in recording.use.values() if not use.slots and use.waiting_now]
    if len(recording.slots) <= len(Phase):  # on one node; on several, slots idle where no sandbox waits
        notes += [_lacking(use) for use in recording.use.values() if _lacks_slots(use)]
    return tuple(notes)


def _lacks_slots(use: StageUse) -> bool:
    return use.waiting_share >= SATURATED and use.busy_while_waiting < LACKING * use.slots


def _none(use: StageUse) -> str:
    return f"there is no slot of {use.stage.upper()}, and {use.waiting_now} jobs wait for one"


def _lacking(use: StageUse) -> str:
    return (
        f"while these jobs waited for {use.stage.upper()}, they held {use.busy_while_waiting:.1f} of its {use.slots} "
        "slots: others had the rest, or some were not there all the time"
    )
