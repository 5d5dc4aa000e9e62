"""The strikes of bench/chaos.py and bench/chaos_cluster.py: their kinds, targets and times, all from one seed.

Most strikes are a SIGKILL of one process. The others last longer than a lease: a SIGSTOP, a cut of the link between the
nodes, a process without free descriptors, a crowd of idle connections, a full disk. Kinds of strikes take turns in a
shuffled order, so that each comes about equally often; the process within a kind is drawn as a share, since their
number is known only at the strike. A killed engine restarts with its first weights, and the far one at its old
endpoint.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

KILLED = (
    *("init", "run", "eval", "engine", "far engine", "execution server", "spawner"),
    *("rollout broker", "backend broker", "supervisor", "trainer"),
)
STOPPED = (
    *("init", "run", "eval", "engine", "execution server", "spawner"),
    *("rollout broker", "backend broker", "supervisor", "trainer"),
)
STARVED = ("rollout broker", "backend broker", "run")
CLUSTER_KILLED = (
    *("init", "run", "eval", "engine", "execution server", "spawner", "node broker", "node supervisor", "node"),
    *("rollout broker", "backend broker", "supervisor", "trainer", "node"),
)
CLUSTER_LASTING = (
    *(("stop", victim) for victim in ("run", "node broker", "node", "rollout broker", "backend broker", "trainer")),
    *(("starve", victim) for victim in ("rollout broker", "node broker", "run")),
    *(("cut", "node"), ("cut", "node"), ("cut", "node"), ("fill", "disk")),
)
LASTING = (
    *(("stop", victim) for victim in STOPPED),
    *(("starve", victim) for victim in STARVED),
    *(("cut", "node"), ("cut", "node"), ("crowd", "rollout broker"), ("fill", "disk")),
)
ALONE = ("rollout broker", "backend broker", "trainer", "disk")
"""Of these there is one."""
KILLS_PER_MINUTE = 6.2
LASTING_MINUTES = 10
"""In so many, each lasting strike comes once."""
LAST_S = 15.0
"""How long they last: more than the default lease of 10 s."""
CALM_S = 12.0
"""Before the first strike, to see what is usual; in a short run, `CALM_OF_TIME`."""
CALM_OF_TIME = 1 / 8


@dataclass(slots=True)
class Strike:
    """One of the things that happen."""

    at_s: float
    """From the start."""
    kind: str
    """`kill`, or that of a lasting one."""
    victim: str
    """The kind of process; `node`: all that run on one; `disk`."""
    share: float
    """Which of those that live then, oldest first: 0 is the first, 1 is behind the last."""
    began: float = 0.0
    """On the machine's monotonic clock; 0.0: it found no victim."""
    lifted: float = field(default=0.0)
    """When what lasts was over."""

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.kind} {self.victim}"

    def chosen(self, those: Sequence[T]) -> T:
        """Give the one of those that it hits."""
        return those[int(self.share * len(those))]

    @property
    def over(self) -> float:
        """From when on the service can be well again: what stands still and is alone has no substitute."""
        return self.lifted if self.kind != "kill" and self.victim in ALONE else self.began


def plan_strikes(
    seed: int,
    minutes: float,
    killed: Sequence[str] = KILLED,
    lasting: Sequence[tuple[str, str]] = LASTING,
) -> list[Strike]:
    """Plan a run of SIGKILLs and of what lasts."""
    draw = random.Random(seed)
    lasting = _in_turn(draw, lasting, max(1, round(len(lasting) * minutes / LASTING_MINUTES)))
    kills = [("kill", victim) for victim in _in_turn(draw, killed, max(3, round(KILLS_PER_MINUTE * minutes)))]
    strikes = [*kills, *lasting]
    draw.shuffle(strikes)
    calm = min(CALM_S, 60 * minutes * CALM_OF_TIME)
    shares = [draw.uniform(0.7, 1.3) for _ in strikes]
    pause = max(2.0, (60 * minutes - calm - LAST_S * len(lasting)) / sum(shares))
    planned, at = [], calm
    for (kind, victim), share in zip(strikes, shares, strict=True):
        planned.append(Strike(at, kind, victim, draw.random()))
        at += pause * share + (LAST_S if kind != "kill" else 0.0)
    return planned


def _in_turn(draw: random.Random, kinds: Sequence[T], count: int) -> list[T]:
    given: list[T] = []
    while len(given) < count:
        given += draw.sample(kinds, len(kinds))
    return given[:count]
