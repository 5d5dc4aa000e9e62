"""Who is slower than its peers, by the median of like work: nodes, backends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from statistics import median
from typing import Generic, NamedTuple, TypeVar

Like = TypeVar("Like", bound=Hashable)
LEAST = 3
"""Fewest works on either side that say anything."""
SLOWER, CLEARLY = 1.5, 0.75
"""How many times its peers' median, and which share of its works above that, are no chance."""


class Slow(NamedTuple, Generic[Like]):
    """A member that is slower."""

    name: str
    ratios: dict[Like, float]
    """How many times as long as its peers it takes for each kind of work in which it is slower."""
    worst: Like
    """The kind of work that costs it most seconds more."""
    seconds: float
    """Its median there."""
    peers_s: float
    works: int

    @property
    def ratio(self) -> float:
        return self.ratios[self.worst]


def slower(works: Iterable[tuple[str, Like, float]]) -> list[Slow[Like]]:
    """Return the slow ones of those whose works are given: whose, of which kind, and how long."""
    of_kind: dict[Like, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, kind, seconds in works:
        of_kind[kind][name].append(seconds)
    found = []
    for name in sorted({name for members in of_kind.values() for name in members}):
        ratios: dict[Like, float] = {}
        costs: dict[Like, tuple[float, float, float, int]] = {}
        for kind, members in of_kind.items():
            own = members.get(name, [])
            others = [seconds for other, values in members.items() if other != name for seconds in values]
            if min(len(own), len(others)) < LEAST:
                continue
            own_s, others_s = median(own), median(others)
            above = sum(seconds > others_s for seconds in own) / len(own)
            if own_s >= SLOWER * others_s and above >= CLEARLY and own_s > 0:
                ratios[kind] = own_s / max(others_s, 1e-6)
                costs[kind] = ((own_s - others_s) * len(own), own_s, others_s, len(own))
        if costs:
            worst = max(costs, key=lambda kind: costs[kind][0])
            _, own_s, others_s, count = costs[worst]
            found.append(Slow(name, ratios, worst, own_s, others_s, count))
    return found
