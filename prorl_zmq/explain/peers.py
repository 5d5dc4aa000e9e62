"""Find nodes and backends that are slower than their peers, by the median of comparable works.

The probability of chance assumes that each work of a member lies above or below its peers' median with equal
probability, times the number of members, since the slowest is selected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from math import comb, erfc, sqrt
from statistics import median
from typing import Generic, NamedTuple, TypeVar

Like = TypeVar("Like", bound=Hashable)
LEAST = 3
"""Fewest works on either side of a comparison."""
SLOWER, CLEARLY = 1.5, 0.75
"""Least ratio to the peers' median, and least share of its works above that median."""
CHANCE = 0.25
"""Largest probability of chance."""
FEW_MEMBERS = 8
"""With more members, each is compared with all, itself included."""
TINY_S = 1e-6
MANY_THROWS = 60


class Slow(NamedTuple, Generic[Like]):
    """A slow member."""

    name: str
    ratios: dict[Like, float]
    """Ratio to the peers' median, for each kind of work in which it is slower."""
    worst: Like
    """The kind of work with the largest excess."""
    seconds: float
    """Its median there."""
    peers_s: float
    works: int
    chance: float
    """The probability of such a member if all are alike."""

    @property
    def ratio(self) -> float:
        return self.ratios[self.worst]


def slower(works: Iterable[tuple[str, Like, float]]) -> list[Slow[Like]]:
    """Return the slow members, from works given as member, kind and seconds."""
    of_kind: dict[Like, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, kind, seconds in works:
        of_kind[kind][name].append(seconds)
    found: dict[str, dict[Like, _Beside]] = defaultdict(dict)
    for kind, members in of_kind.items():
        everybody = sorted(seconds for own in members.values() for seconds in own)
        for name, own in members.items():
            few = len(members) <= FEW_MEMBERS
            others = [s for other, each in members.items() if other != name for s in each] if few else everybody
            beside = _beside(own, others, len(members))
            if beside is not None:
                found[name][kind] = beside
    return [_slow(name, kinds) for name, kinds in sorted(found.items())]


class _Beside(NamedTuple):
    seconds: float
    peers_s: float
    works: int
    chance: float

    @property
    def costs_s(self) -> float:
        return (self.seconds - self.peers_s) * self.works


def _beside(own: list[float], others: list[float], members: int) -> _Beside | None:
    """Return a member's comparison with its peers; None: it is not slower."""
    if min(len(own), len(others)) < LEAST:
        return None
    own_s, others_s = median(own), median(others)
    above = sum(seconds > others_s for seconds in own)
    chance = members * _at_least(above, len(own))
    slow = own_s >= SLOWER * others_s and above >= CLEARLY * len(own) and chance <= CHANCE
    return _Beside(own_s, others_s, len(own), chance) if slow else None


def _slow(name: str, kinds: dict[Like, _Beside]) -> Slow[Like]:
    worst = max(kinds, key=lambda kind: kinds[kind].costs_s)
    ratios = {kind: one.seconds / max(one.peers_s, TINY_S) for kind, one in kinds.items()}
    return Slow(name, ratios, worst, *kinds[worst])


def _at_least(heads: int, throws: int) -> float:
    """Return the probability of at least so many heads; approximately, for many throws."""
    if throws > MANY_THROWS:
        return erfc((heads - 0.5 - throws / 2) / sqrt(throws / 2)) / 2
    return float(sum(comb(throws, each) for each in range(heads, throws + 1)) / 2**throws)
