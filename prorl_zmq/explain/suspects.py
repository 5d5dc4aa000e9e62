"""Suspects other than the stages: each with the change that would undo it. The replay decides which one matters.

A slow node or backend (against its peers), a slow task (against the others), lost attempts, a backend that computes
prefixes again (its KV cache is too small), a few rollouts that last much longer than others of their task, first INITs
of a node (images not loaded yet), first RUNs of a stage process (tokenizer not loaded yet), and a client that submits
too slowly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Literal

from ..system.duration import duration
from ..wire.messages.jobs import Phase
from .kv_loss import kv_losses
from .parts import BACKEND, OWN_CODE, ROOM, WORKING, stage_of, work_name
from .peers import LEAST, Like, Slow, slower
from .replay import Change, Factor
from .rollout import medians

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .recording import Recording
    from .rollout import Rollout, Work

Kind = Literal[
    "stage",
    "slots",
    "engine",
    "tool",
    "task",
    "node",
    "backend",
    "kv",
    "losses",
    "straggler",
    "cold",
    "client",
    "nothing",
]
LONG = 3.0
"""Ratio to the median from which a rollout is a straggler, and a first work cold."""
FEW = 0.1
"""Most stragglers, as a share of the rollouts."""
BY_CHANCE = 0.05
"""Probability of chance above which a suspect is doubted."""
SLOWER_TASK, MOST_OF_ALL = 2.0, 0.7
"""A task is slow at this ratio to the others, if it has at most this share of the rollouts."""


@dataclass(frozen=True, slots=True)
class Suspect:
    kind: Kind
    name: str
    evidence: str
    """A main clause."""
    change: Change
    stage: str = ""
    part: str = ""
    """The part of the work."""
    job_ids: tuple[str, ...] = ()
    doubt: str = ""
    """A reason against it."""
    cross_cut: bool = False
    """It is a share of the time of stages, engines and tools, and says more than these."""


def suspects(recording: Recording) -> list[Suspect]:
    finders: tuple[Callable[[Recording], Iterator[Suspect]], ...] = (
        *(
            _losses,
            _small_kv_caches,
            _slow_nodes,
            _slow_backends,
            _cold_inits,
            _cold_runs,
            _slow_tasks,
            _stragglers,
            _client,
        ),
    )
    return [suspect for find in finders for suspect in find(recording)]


def _losses(recording: Recording) -> Iterator[Suspect]:
    failures = [work for work in recording.works if work.failed]
    if not failures:
        return
    (phase, code), count = Counter((work.phase, work.lost) for work in failures).most_common(1)[0]
    node, on_node = Counter(work.node for work in failures).most_common(1)[0]
    where = f", {on_node} times on node {node}" if node and len({work.node for work in recording.works}) > 1 else ""
    jobs = [rollout.job_id for rollout in recording.rollouts if any(work.lost for work in rollout.works)]
    seconds = sum(work.seconds for work in recording.works if work.lost)
    stage = phase.upper()
    evidence = (
        f"{len(jobs)} of {len(recording.rollouts)} rollouts did {duration(seconds)} of work again, since {stage} "
        f"failed {count} times with {code}{where}"
    )
    change = Change(lambda _rollout, work, _part: 0.0 if work.lost else 1.0)
    yield Suspect("losses", code, evidence, change, stage=stage, job_ids=tuple(jobs), cross_cut=True)


def _small_kv_caches(recording: Recording) -> Iterator[Suspect]:
    losses = kv_losses(recording)
    if not losses:
        return
    worst = max(losses, key=lambda backend: losses[backend].again_tokens)
    loss = losses[worst]
    more = f", as did {len(losses) - 1} other backends" if len(losses) > 2 else ", as did another backend"
    evidence = (
        f"backend {worst} computed {loss.share:.0%} of its prompt tokens within {duration(loss.window_s)} again"
        f"{more if len(losses) > 1 else ''}, {loss.again_tokens:,} tokens in all: it had dropped them from its cache "
        "for other rollouts"
    )
    doubt = "" if loss.is_known else "it is not known how much of the engine's time they took"
    of_time = {backend: one.of_time for backend, one in losses.items()}
    change = Change(partial(_without_loss, of_time))
    yield Suspect("kv", worst, evidence, change, stage="RUN", part="engine", doubt=doubt, cross_cut=True)


def _slow_nodes(recording: Recording) -> Iterator[Suspect]:
    """Compare nodes by all work but the engines' and the waits for them."""
    works = [
        (work.node, (rollout.task, part), seconds)
        for rollout in recording.rollouts
        for work in rollout.counted
        for part, seconds in work.parts.items()
        if part not in ("engine", BACKEND, ROOM) and work.node
    ]
    for slow in slower(works):
        task, part = slow.worst
        yield _slow("node", slow, f"{work_name(part)} of task {task}", part, partial(_node_like_peers, slow))


def _slow_backends(recording: Recording) -> Iterator[Suspect]:
    """Compare a model's backends by the seconds of a token, or of a rollout where tokens are not known."""
    runs = [
        (rollout, work, work.parts["engine"])
        for rollout in recording.rollouts
        for work in rollout.counted
        if work.backend and work.parts.get("engine")
    ]
    tokens = all(rollout.tokens for rollout, _, _ in runs)
    works = [
        (work.backend, (rollout.task, rollout.model), s / (rollout.tokens if tokens else 1))
        for rollout, work, s in runs
    ]
    for slow in slower(works):
        what = f"a {'token' if tokens else 'rollout'} of task {slow.worst[0]}"
        yield _slow("backend", slow, what, "engine", partial(_backend_like_peers, slow))


def _slow(kind: Kind, slow: Slow[Like], what: str, part: str, factor: Factor) -> Suspect:
    evidence = (
        f"{kind} {slow.name} took {duration(slow.seconds)} for {what} and its peers {duration(slow.peers_s)}, "
        f"{slow.ratio:.1f} times as long (medians, {slow.works} works)"
    )
    doubt = f"with {slow.works} works it may be chance" if slow.chance > BY_CHANCE else ""
    stage = stage_of(part)
    return Suspect(kind, slow.name, evidence, Change(factor), stage=stage, part=part, doubt=doubt, cross_cut=True)


def _cold_inits(recording: Recording) -> Iterator[Suspect]:
    """Compare the first INITs of a node and task, as many as it has slots, with the later ones."""
    works: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for rollout in recording.rollouts:
        for work in rollout.counted:
            if work.phase == Phase.INIT:
                works[work.node, rollout.task].append(work)
    usual_s: dict[int, float] = {}
    nodes, crowded = set(), False
    for (node, _), inits in works.items():
        inits.sort(key=lambda work: work.began)
        count = recording.slots.get((Phase.INIT, node), 1)
        if cold := _cold(inits[:count], inits[count:], "INIT"):
            usual_s |= cold
            nodes.add(node)
            crowd = _at_once(inits)
            first_s, later_s = (median(work.seconds for work in each) for each in (inits[:count], inits[count:]))
            crowded |= first_s < LONG * later_s * median(crowd[:count]) / median(crowd[count:])
    if not usual_s:
        return
    cold_s = median(work.seconds for work in recording.works if id(work) in usual_s)
    evidence = (
        f"the first {len(usual_s)} INITs of {_nodes(nodes)} took {duration(cold_s)} each and later ones "
        f"{duration(median(usual_s.values()))}, as with images that were not there yet"
    )
    doubt = "more of the first INITs were at work at once, which may be why they were slow" if crowded else ""
    change = Change(partial(_like_later, usual_s, "INIT"))
    yield Suspect("cold", "INIT", evidence, change, stage="INIT", part="INIT", doubt=doubt, cross_cut=True)


def _cold_runs(recording: Recording) -> Iterator[Suspect]:
    """Compare the own code of a stage process's first RUNs, which began before one had ended, with that of later ones.

    The first RUNs wait together for what the process loads once, such as a tokenizer.
    """
    runs: dict[str, list[Work]] = defaultdict(list)
    for work in (work for rollout in recording.rollouts for work in rollout.counted):
        if work.phase == Phase.RUN and OWN_CODE in work.parts:
            runs[work.stage_id or work.node].append(work)
    usual_s: dict[int, float] = {}
    for works in runs.values():
        first_end = min(work.ended for work in works)
        first = [work for work in works if work.began < first_end]
        usual_s |= _cold(first, [work for work in works if work.began >= first_end], OWN_CODE)
    if not usual_s:
        return
    cold_s = median(work.parts[OWN_CODE] for work in recording.works if id(work) in usual_s)
    evidence = (
        f"{work_name(OWN_CODE)} took {duration(cold_s)} in the first {len(usual_s)} RUNs of their stage processes "
        f"and {duration(median(usual_s.values()))} in later ones, as with a tokenizer that was not loaded yet"
    )
    change = Change(partial(_like_later, usual_s, OWN_CODE))
    yield Suspect("cold", "RUN", evidence, change, stage="RUN", part=OWN_CODE, cross_cut=True)


def _cold(first: list[Work], later: list[Work], part: str) -> dict[int, float]:
    """Return the median of later works, by the id of each slower first work; empty: the first ones are not slow."""
    if not first or len(later) < LEAST:
        return {}
    first_s, later_s = (median(work.parts.get(part, 0.0) for work in each) for each in (first, later))
    slow = [work for work in first if work.parts.get(part, 0.0) > later_s]
    return {id(work): later_s for work in slow} if first_s >= LONG * later_s else {}


def _like_later(usual_s: dict[int, float], part: str, _rollout: Rollout, work: Work, name: str) -> float:
    return usual_s[id(work)] / work.parts[part] if name == part and id(work) in usual_s else 1.0


def _at_once(works: list[Work]) -> list[int]:
    """Return how many of these were running in the middle of each, itself included."""
    began, ended = sorted(work.began for work in works), sorted(work.ended for work in works)
    middles = [(work.began + work.ended) / 2 for work in works]
    return [max(1, bisect_right(began, middle) - bisect_left(ended, middle)) for middle in middles]


def _slow_tasks(recording: Recording) -> Iterator[Suspect]:
    by_task: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in recording.rollouts:
        if rollout.counted:
            by_task[rollout.task].append(rollout)
    for task, rollouts in by_task.items():
        others = [one for name, each in by_task.items() if name != task for one in each]
        enough = min(len(rollouts), len(others)) >= LEAST
        if not enough or len(rollouts) > MOST_OF_ALL * len(recording.rollouts):
            continue
        own_s, others_s = (median(one.worked_s for one in each) for each in (rollouts, others))
        if own_s < SLOWER_TASK * others_s or not own_s:
            continue
        part, part_s = _most(medians(rollouts))
        evidence = (
            f"a rollout of task {task} took {duration(own_s)} and one of the other tasks {duration(others_s)}; "
            f"most of it, {duration(part_s)}, was {work_name(part)}"
        )
        change = Change(partial(_task_like_others, task, others_s / own_s))
        yield Suspect("task", task, evidence, change, stage=stage_of(part), part=part, cross_cut=True)


def _stragglers(recording: Recording) -> Iterator[Suspect]:
    by_task: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in recording.rollouts:
        by_task[rollout.task].append(rollout)
    usual_s = {task: median(one.worked_s for one in each) for task, each in by_task.items()}
    long = [one for one in recording.rollouts if one.worked_s > LONG * usual_s[one.task] > 0]
    if not long or len(long) > max(1, FEW * len(recording.rollouts)):
        return
    long.sort(key=lambda one: -one.worked_s)
    longest = long[0]
    usual = medians(by_task[longest.task])
    part, _ = _most({name: s - usual.get(name, 0.0) for name, s in longest.parts().items()})
    evidence = (
        f"{len(long)} of {len(recording.rollouts)} rollouts worked more than {LONG:g} times as long as the median of "
        f"their task; the longest, {longest.job_id}, took {duration(longest.worked_s)} instead of "
        f"{duration(usual_s[longest.task])}, most of it in {work_name(part)}{_step(longest, part)}"
    )
    shorter = {one.job_id: usual_s[one.task] / one.worked_s for one in long}
    change = Change(lambda rollout, _work, _part: shorter.get(rollout.job_id, 1.0))
    ids = tuple(one.job_id for one in long)
    yield Suspect("straggler", longest.job_id, evidence, change, stage=stage_of(part), part=part, job_ids=ids)


def _client(recording: Recording) -> Iterator[Suspect]:
    span_s = max(rollout.accepted for rollout in recording.rollouts) - recording.began
    slots = max(recording.slots_of(phase) for phase in WORKING)
    at_once = sum(rollout.worked_s for rollout in recording.rollouts) / max(recording.wall_s, 1e-9)
    evidence = (
        f"the rollouts were submitted over {duration(span_s)}, and {at_once:.1f} of them were at work on average, in "
        f"stages of up to {slots} slots"
    )
    yield Suspect("client", "client", evidence, Change(at_once=True))


def _node_like_peers(slow: Slow[tuple[str, str]], rollout: Rollout, work: Work, part: str) -> float:
    return 1.0 / slow.ratios.get((rollout.task, part), 1.0) if work.node == slow.name else 1.0


def _backend_like_peers(slow: Slow[tuple[str, str]], rollout: Rollout, work: Work, part: str) -> float:
    kind = rollout.task, rollout.model
    return 1.0 / slow.ratios.get(kind, 1.0) if work.backend == slow.name and part == "engine" else 1.0


def _without_loss(of_time: dict[str, float], _rollout: Rollout, work: Work, part: str) -> float:
    return 1.0 - of_time.get(work.backend, 0.0) if part == "engine" else 1.0


def _task_like_others(task: str, factor: float, rollout: Rollout, _work: Work, _part: str) -> float:
    return factor if rollout.task == task else 1.0


def _step(rollout: Rollout, part: str) -> str:
    step = rollout.longest
    if step is None or step.name != part:
        return ""
    return f" (the longest step in turn {step.turn}, {duration(step.seconds)})"


def _most(seconds: dict[str, float]) -> tuple[str, float]:
    return max(seconds.items(), key=lambda one: one[1])


def _nodes(nodes: set[str]) -> str:
    named = sorted(node for node in nodes if node)
    return f"node {named[0]}" if len(named) == 1 else f"{len(named)} nodes" if named else "the node"
