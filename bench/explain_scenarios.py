"""The runs of bench/explain.py: in each a known thing is slow, lost or missing, which `explain` has to name."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from explain_process import Staged
from explain_service import Drip, Feed, Window

from prorl_zmq import Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.explain.explanation import Explanation

ROLES = ("init", "run", "eval")
ENGINES = ("engine:engine-0", "engine:engine-1")
SLOTS = 6


def layout(*nodes: str, **few: int) -> tuple[str, ...]:
    """Return the processes of a service: each role on each node, and two engines."""
    return (*(f"{node}:{role}:{few.get(role, SLOTS)}" for node in nodes for role in ROLES), *ENGINES)


ONE, TWO = layout("node-0"), layout("node-0", "node-1")
CONTEXT = 2_000
"""Tokens of a rollout's prompt, where engines have a KV cache."""


def with_kv(contexts: float) -> tuple[str, ...]:
    """Return the processes of a service with one engine, whose KV cache holds so many of these contexts."""
    return (*ONE[: -len(ENGINES)], f"engine:engine-0:{round(contexts * 1.2 * CONTEXT)}")


TINY_KV, SMALL_KV, LARGE_KV = with_kv(2.5), with_kv(3), with_kv(30)
LONG: dict[str, Any] = {"context": CONTEXT, "token_s": 25e-6, "tools": {"search": 0.15}}
"""Rollouts that fill a KV cache; each prompt token takes so long."""


@dataclass(frozen=True)
class Scenario:
    """One run, and what bounds it."""

    name: str
    kind: str
    """Of the finding, as is the next one."""
    subject: str
    jobs: Callable[[Path], list[Job]]
    """Given a folder that they may use."""
    processes: tuple[str, ...] = ONE
    feed: Callable[[], Feed] = Feed
    part: str = ""
    """Of the finding too; empty: any."""
    kills: str = ""
    """A process that is killed meanwhile."""
    no_backend_s: float = 0.0
    """For so long at the beginning, engines take no jobs."""
    schedule: Literal["kv", "slots"] = "kv"
    weights_every_s: float = 0.0
    """How often engines take new weights; 0: never."""

    @property
    def service(self) -> tuple[str, ...]:
        """Runs of which this is the same may share a service; of one that changes its processes it is not."""
        changes = self.kills or self.weights_every_s or self.kind == "cold"
        return (*self.processes, self.schedule, *((self.name,) if changes else ()))

    def is_named(self, explanation: Explanation) -> bool:
        """Tell whether an explanation names it."""
        found = explanation.finding
        right = found.kind == self.kind and found.part == (self.part or found.part)
        return right and (found.name == self.subject or self.subject in found.job_ids)


SPREAD = 0.4
"""Of the log-normal times of like rollouts."""


def same(count: int = 30, task: str = "staged", **staged: Any) -> list[Job]:
    """Return so many jobs that are alike, but for the spread that real ones have."""
    draw = np.random.default_rng(zlib.crc32(repr((count, task, staged)).encode()))
    return [Job(task=task, instance=_spread(Staged(**staged), draw), backend_wait_s=10.0) for _ in range(count)]


def _spread(staged: Staged, draw: np.random.Generator) -> dict[str, Any]:
    fields = msgspec.to_builtins(staged)
    for name in ("init_s", "own_s", "engine_s", "eval_s"):
        fields[name] *= draw.lognormal(-(SPREAD**2) / 2, SPREAD)
    fields["tools"] = {name: s * draw.lognormal(-(SPREAD**2) / 2, SPREAD) for name, s in staged.tools.items()}
    return fields


def all_alike(count: int = 30, **staged: Any) -> Callable[[Path], list[Job]]:
    return lambda _folder: same(count, **staged)


def mixed(count: int = 24, **other: Any) -> Callable[[Path], list[Job]]:
    """Two tasks in turn."""

    def jobs(_folder: Path) -> list[Job]:
        pairs = zip(same(count // 2), same(count // 2, "staged-b", **other), strict=True)
        return [job for pair in pairs for job in pair]

    return jobs


def one_long(place: int, count: int = 40, **staged: Any) -> Callable[[Path], list[Job]]:
    """One job, called `long`, among others."""

    def jobs(_folder: Path) -> list[Job]:
        plain = same(count)
        (long,) = same(1, **staged)
        plain[place] = msgspec.structs.replace(long, job_id="long")
        return plain

    return jobs


def failing(folder: Path) -> list[Job]:
    """Each second job fails after its work in RUN, and is done again."""
    plain = same(15, tools={"search": 0.1})
    bad = [same(1, tools={"search": 0.8}, fails=str(folder / f"failed-{n}"))[0] for n in range(15)]
    return [job for pair in zip(bad, plain, strict=True) for job in pair]


def balanced(_folder: Path) -> list[Job]:
    return same(6, init_s=0.4, engine_s=0.2, tools={"search": 0.2, "browse": 0.2}, eval_s=0.4, own_s=0.2)


def tasks_alike(_folder: Path) -> list[Job]:
    """Two tasks in turn, one of which takes somewhat longer."""
    pairs = zip(same(15, engine_s=0.2), same(15, "staged-b", engine_s=0.28), strict=True)
    return [job for pair in pairs for job in pair]


def with_one_loss(folder: Path) -> list[Job]:
    """A slow tool, and one job that fails once."""
    (bad,) = same(1, tools={"search": 0.4}, fails=str(folder / "failed"))
    return [bad, *same(29, tools={"search": 0.4})]


SLOW_NODE = {"node-1": 8.0}
SCENARIOS = (
    Scenario("INIT is slow", "stage", "INIT", all_alike(init_s=0.4)),
    Scenario("EVAL is slow", "stage", "EVAL", all_alike(eval_s=0.4)),
    Scenario("RUN's own code is slow", "stage", "RUN", all_alike(own_s=0.4), part="own code"),
    Scenario("a tool in sandboxes is slow", "tool", "bash", all_alike(18, tools={"bash": 0.8}), part="tool.bash"),
    Scenario("one tool of two is slow", "tool", "browse", all_alike(tools={"search": 0.05, "browse": 0.4})),
    Scenario("engines are slow", "engine", "engine", all_alike(engine_s=0.25)),
    Scenario("engines take one request at a time", "engine", "engine", all_alike(engine_s=0.08, one_by_one=True)),
    Scenario(
        "one backend of two is slow",
        *("backend", "engine-1"),
        all_alike(engine_s=0.06, engine_times={"engine-1": 8.0}),
    ),
    Scenario("one task of two has a slow EVAL", "task", "staged-b", mixed(eval_s=0.8), part="EVAL"),
    Scenario("one task of two has a slow INIT", "task", "staged-b", mixed(init_s=0.8), part="INIT"),
    Scenario("one task of two has a slow tool", "task", "staged-b", mixed(tools={"search": 0.8}), part="tool.search"),
    Scenario("INIT has one slot", "slots", "INIT", all_alike(init_s=0.1), layout("node-0", init=1)),
    Scenario("RUN has one slot", "slots", "RUN", all_alike(), layout("node-0", run=1)),
    Scenario("EVAL has one slot", "slots", "EVAL", all_alike(eval_s=0.1), layout("node-0", eval=1)),
    Scenario("one rollout has a long tool call", "straggler", "long", one_long(20, tools={"search": 4.0})),
    Scenario("one rollout has a long EVAL", "straggler", "long", one_long(3, eval_s=4.0), part="EVAL"),
    Scenario("the client submits now and then", "client", "client", all_alike(20), feed=lambda: Drip(0.2)),
    Scenario("the client waits for each result", "client", "client", all_alike(14), feed=lambda: Window(1)),
    Scenario("RUN fails and is done again", "losses", "sandbox_failed", failing),
    Scenario(
        "a process of RUN dies",
        *("losses", "lease_lost"),
        all_alike(24, tools={"search": 0.25}),
        (*layout("node-0", run=4), "node-0:run:5"),
        kills="node-0:run:5",
    ),
    Scenario(
        "tools are slow on one node of two",
        *("node", "node-1"),
        all_alike(tools={"search": 0.1}, node_times=SLOW_NODE),
        TWO,
        part="tool.search",
    ),
    Scenario(
        "INIT is slow on one node", "node", "node-1", all_alike(60, init_s=0.1, node_times=SLOW_NODE), TWO, part="INIT"
    ),
    Scenario(
        "EVAL is slow on one node", "node", "node-1", all_alike(eval_s=0.15, node_times=SLOW_NODE), TWO, part="EVAL"
    ),
    Scenario("the first INITs are cold", "cold", "INIT", all_alike(40, cold_s=3.0)),
    # What is slow is less so, or something else is wrong too and matters less.
    Scenario(
        "one backend takes three times as long",
        "backend",
        "engine-1",
        all_alike(48, engine_s=0.1, engine_times={"engine-1": 3.0}),
    ),
    Scenario(
        "one node takes three times as long",
        "node",
        "node-1",
        all_alike(60, tools={"search": 0.2}, node_times={"node-1": 3.0}),
        TWO,
    ),
    Scenario(
        "INIT is slow, and a backend too",
        "stage",
        "INIT",
        all_alike(init_s=0.5, engine_s=0.01, engine_times={"engine-1": 6.0}),
    ),
    Scenario(
        "a tool is slow, on two nodes",
        "tool",
        "bash",
        all_alike(24, tools={"bash": 0.8}),
        TWO,
    ),
    Scenario("a tool is slow, and one rollout is lost once", "tool", "search", with_one_loss),
    Scenario("engines are slow, and a task takes longer", "engine", "engine", tasks_alike),
    Scenario(
        "EVAL is slow, and the client has a window", "stage", "EVAL", all_alike(40, eval_s=0.4), feed=lambda: Window(10)
    ),
    Scenario(
        "the client has a small window",
        "client",
        "client",
        all_alike(24, tools={"search": 0.2}),
        feed=lambda: Window(2),
    ),
    Scenario("few rollouts, with slow engines", "engine", "engine", all_alike(5, engine_s=0.5)),
    Scenario(
        "RUN has few slots, and its tool is long",
        "slots",
        "RUN",
        all_alike(24, tools={"search": 0.2}),
        layout("node-0", run=2),
    ),
    Scenario("engines are not ready", "engine", "backend", all_alike(24), no_backend_s=1.5),
    Scenario("all parts take about as long", "nothing", "nothing", balanced),
    Scenario(
        "a KV cache does not hold the contexts", "kv", "engine-0", all_alike(40, **LONG), SMALL_KV, schedule="slots"
    ),
    Scenario("engines have no room for more rollouts", "engine", "room", all_alike(40, **LONG), TINY_KV),
    Scenario(
        "engines are slow, and new weights empty their caches",
        "engine",
        "engine",
        all_alike(40, **LONG),
        LARGE_KV,
        weights_every_s=0.1,
    ),
)
