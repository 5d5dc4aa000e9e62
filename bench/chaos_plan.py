"""What bench/chaos.py does to whom and when, all from one seed.

A strike is a SIGKILL of one process, a SIGSTOP of one for longer than its lease, or a cut of the link between the nodes
for as long. Kinds of process take turns in a shuffled order, so that each is struck about equally often; which of the
processes of a kind it is, is drawn as a share, since how many there are is known only at that moment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

KILLED = (
    *("init", "run", "eval", "engine", "execution server", "spawner"),
    *("rollout broker", "backend broker", "supervisor", "trainer"),
)
STOPPED = ("init", "run", "eval", "engine", "rollout broker", "backend broker", "execution server", "trainer")
SINGLE = ("rollout broker", "backend broker", "trainer")
"""Of these there is one."""
KILLS_OF_STRIKES = 5 / 6
LAST_S = 12.0
"""How long a stop or a cut lasts: more than the default lease of 10 s."""
CALM_S = 12.0
"""Before the first strike, to see what is usual; in a short run, `CALM_OF_TIME`."""
CALM_OF_TIME = 1 / 8
STRIKES_PER_MINUTE = 7.4


@dataclass(slots=True)
class Strike:
    """One of the things that happen."""

    at_s: float
    """From the start."""
    kind: str
    """`kill`, `stop` or `cut`."""
    victim: str
    """The kind of process; `link` for a cut."""
    share: float
    """Which of those that live then, oldest first: 0 is the first, 1 is behind the last."""
    began: float = 0.0
    """On the machine's monotonic clock; 0.0: it found no victim."""
    lifted: float = field(default=0.0)
    """When the process went on, or the link was mended."""

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.kind} {self.victim}"

    @property
    def over(self) -> float:
        """From when on the service can be well again: a broker or trainer that stands still has no substitute."""
        return self.lifted if self.kind == "stop" and self.victim in SINGLE else self.began


def plan_strikes(seed: int, minutes: float) -> list[Strike]:
    """Plan a run."""
    draw = random.Random(seed)
    count = max(3, round(minutes * STRIKES_PER_MINUTE))
    kills = min(round(count * KILLS_OF_STRIKES), count - 2)
    stops = (count - kills) // 2
    strikes = [("kill", victim) for victim in _in_turn(draw, KILLED, kills)]
    strikes += [("stop", victim) for victim in _in_turn(draw, STOPPED, stops)]
    strikes += [("cut", "link")] * (count - kills - stops)
    draw.shuffle(strikes)
    lasting = sum(LAST_S for kind, _ in strikes if kind != "kill")
    calm = min(CALM_S, 60 * minutes * CALM_OF_TIME)
    pause = max(2.0, (60 * minutes - calm - lasting) / count)
    planned, at = [], calm
    for kind, victim in strikes:
        planned.append(Strike(at, kind, victim, draw.random()))
        at += pause * draw.uniform(0.7, 1.3) + (LAST_S if kind != "kill" else 0.0)
    return planned


def _in_turn(draw: random.Random, kinds: tuple[str, ...], count: int) -> list[str]:
    given: list[str] = []
    while len(given) < count:
        given += draw.sample(kinds, len(kinds))
    return given[:count]
