"""Recordings for tests, made by hand: rollouts that pass one stage after the other, of given seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_zmq.explain.parts import OWN_CODE
from prorl_zmq.explain.recording import Recording
from prorl_zmq.explain.rollout import Rollout, Work
from prorl_zmq.wire.messages.jobs import Outcome, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Parts = dict[str, float]
SLOTS = {(Phase.INIT, "n"): 4, (Phase.RUN, "n"): 4, (Phase.EVAL, "n"): 4}


def work(
    phase: Phase, began: float, parts: Parts, *, queued_at: float | None = None, node: str = "n", backend: str = "b"
) -> Work:
    queued_at = began if queued_at is None else queued_at
    return Work(phase, queued_at, began, began + sum(parts.values()), parts, node, f"{phase}-{node}", backend)


def rollout(job_id: str, works: Iterable[Work], accepted: float = 0.0, task: str = "t", tokens: int = 0) -> Rollout:
    works = tuple(works)
    ended = works[-1].ended if works else None
    return Rollout(job_id, task, accepted, ended, works, outcome=Outcome.COMPLETED, divided=True, tokens=tokens)


def passing(
    jobs: Iterable[tuple[float, Mapping[str, float]]],
    slots: int = 4,
    task: str = "t",
    node: str = "n",
    backend: str = "b",
) -> list[Rollout]:
    """Return rollouts that come at given times and pass the three stages, each with so many slots, in their order."""
    free = {phase: [0.0] * slots for phase in Phase}
    rollouts = []
    for number, (accepted, parts) in enumerate(jobs):
        at, works = accepted, []
        for phase in Phase:
            own = {
                part: s for part, s in parts.items() if (part if part in ("INIT", "EVAL") else "RUN") == phase.upper()
            }
            began = max(at, free[phase][0])
            works.append(work(phase, began, own, queued_at=at, node=node, backend=backend))
            at = works[-1].ended
            free[phase] = sorted([*free[phase][1:], at])
        rollouts.append(rollout(f"{task}-{node}-{backend}-{number}", works, accepted, task))
    return rollouts


def recording(
    *groups: list[Rollout], now: float | None = None, slots: Mapping[tuple[Phase, str], int] = SLOTS
) -> Recording:
    rollouts = sorted((one for group in groups for one in group), key=lambda one: one.accepted)
    return Recording(tuple(rollouts), dict(slots), now)


USUAL: Parts = {"INIT": 0.1, "engine": 0.1, "tool.bash": 0.1, OWN_CODE: 0.05, "EVAL": 0.1}
