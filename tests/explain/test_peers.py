"""Who is slower than its peers, and how likely that is by chance."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from prorl_zmq.explain.diagnosis import diagnose
from prorl_zmq.explain.peers import slower
from prorl_zmq.wire.messages.jobs import Phase

from .recordings import USUAL, passing, recording


def works(**members: list[float]) -> list[tuple[str, str, float]]:
    return [(name, "kind", seconds) for name, each in members.items() for seconds in each]


def test_a_slow_member_beside_its_peers() -> None:
    (slow,) = slower(works(a=[1.0] * 10, b=[1.2] * 10, c=[3.0] * 10))
    assert (slow.name, slow.seconds, slow.peers_s, slow.works) == ("c", 3.0, 1.1, 10)
    assert slow.ratio == pytest.approx(3.0 / 1.1)
    assert slow.chance == pytest.approx(3 / 2**10)


def test_only_like_work_is_compared() -> None:
    """The one has only the long kind of work, which takes as long on the other."""
    of_kinds = [("a", "long", 9.0)] * 9 + [("b", "long", 9.0)] * 9 + [("b", "short", 1.0)] * 90
    assert slower(of_kinds) == []


@pytest.mark.parametrize(("count", "chance"), [(2, None), (3, 2 / 8), (6, 2 / 64)])
def test_few_works_may_be_chance(count: int, chance: float | None) -> None:
    found = slower(works(a=[1.0] * 30, b=[5.0] * count))
    assert [one.chance for one in found] == ([chance] if chance is not None else [])


def test_the_chance_of_many_works_is_as_that_of_few() -> None:
    def chance(count: int) -> float:
        """Three quarters of the works of a member are above its peers' median."""
        own = [5.0] * (count * 3 // 4) + [0.5] * (count // 4)
        (slow,) = slower(works(a=[1.0] * 100, b=own))
        return slow.chance

    assert chance(64) == pytest.approx(2 * sum(comb(64, heads) for heads in range(48, 65)) / 2**64, rel=0.5)
    assert chance(20_000) < 1e-300


def test_of_many_members_the_slow_one_is_found_too() -> None:
    many = {f"n-{number}": [1.0 + number / 1000] * 12 for number in range(300)}
    (slow,) = slower(works(**many | {"n-7": [4.0] * 12}))
    assert slow.name == "n-7"


def test_backends_that_are_alike_are_hardly_ever_named_for_sure() -> None:
    """Their rollouts spread widely, so that one of the four is always the slowest."""
    named = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        groups = [
            passing(
                [(0.0, {part: s * float(draw.lognormal(sigma=0.8)) for part, s in USUAL.items()}) for _ in range(8)],
                slots=2,
                node=f"n-{backend}",
                backend=f"b-{backend}",
            )
            for backend in range(4)
        ]
        found = diagnose(recording(*groups, slots={(phase, f"n-{n}"): 2 for phase in Phase for n in range(4)}), "it")
        named += [found.finding.name] if found.finding.kind in ("backend", "node") and found.sureness == "sure" else []
    assert len(named) <= 1, named
