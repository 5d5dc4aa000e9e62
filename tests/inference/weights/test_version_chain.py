"""How a host reaches a version with the fewest bytes, and which versions may be deleted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.inference.weights.version_chain import (
    ANCHOR_SHARE,
    CHAIN_LIMIT,
    Content,
    Route,
    Version,
    find_route,
    is_anchor_due,
    needed_versions,
)

FULL = 1000


def chain(*versions: tuple[int, bool, int]) -> dict[int, Version]:
    """Return versions by number, each built on the one before: number, whether it is an anchor, bytes of its delta."""
    made: dict[int, Version] = {}
    before = None
    for number, is_anchor, delta_bytes in versions:
        base = (before, f"w{before}", delta_bytes) if before is not None and delta_bytes else (None, "", 0)
        made[number] = Version(number, f"w{number}", FULL if is_anchor else None, *base)
        before = number
    return made


PLAIN = chain((1, True, 0), (2, False, 10), (3, False, 20), (4, True, 30), (5, False, 40))


def had(version: int) -> Content:
    return Content(version, f"w{version}")


@pytest.mark.parametrize(
    ("has", "wanted", "route"),
    [
        (None, 1, Route(1, (), False, 1000)),
        (None, 3, Route(1, (2, 3), False, 1030)),
        (None, 4, Route(4, (), False, 1000)),
        (None, 5, Route(4, (5,), False, 1040)),
        (had(5), 5, Route(None, (), False, 0)),
        (had(4), 5, Route(None, (5,), False, 40)),
        (had(1), 5, Route(None, (2, 3, 4, 5), False, 100)),
        (had(5), 4, Route(None, (5,), True, 40)),
        (had(5), 3, Route(1, (2, 3), False, 1030)),
        (Content(4), 5, Route(None, (5,), False, 40)),
        (Content(4, "another"), 5, Route(4, (5,), False, 1040)),
        (Content(5, "another"), 5, Route(4, (5,), False, 1040)),
        (Content(5, "another"), 4, Route(4, (), False, 1000)),
        (had(7), 5, Route(4, (5,), False, 1040)),
        (None, 6, None),
        (had(5), 6, None),
    ],
)
def test_ways_to_a_version(has: Content | None, wanted: int, route: Route | None) -> None:
    assert find_route(PLAIN.get, has, had(wanted)) == route


def test_an_anchor_is_read_if_the_deltas_are_more() -> None:
    published = chain((1, True, 0), (2, False, 600), (3, True, 600), (4, False, 5))
    assert find_route(published.get, had(1), had(4)) == Route(3, (4,), False, 1005)
    assert find_route(published.get, had(2), had(4)) == Route(None, (3, 4), False, 605)


def test_a_way_does_not_lead_over_a_version_that_was_written_again() -> None:
    published = PLAIN | {3: Version(3, "again", None, 2, "w2", 20)}
    assert find_route(published.get, had(1), had(5)) == Route(4, (5,), False, 1040)
    assert find_route(published.get, None, Content(3, "w3")) is None
    assert find_route(published.get, None, Content(3)) == Route(1, (2, 3), False, 1030)


def test_no_more_is_looked_at_than_can_pay() -> None:
    looked: list[int] = []

    def look(version: int) -> Version | None:
        looked.append(version)
        return PLAIN.get(version)

    find_route(look, had(4), had(5))
    assert looked == [5]
    looked.clear()
    find_route(look, None, had(4))
    assert looked == [4, 3, 2, 1]


def test_anchors_are_due_by_bytes() -> None:
    assert not is_anchor_due(100, 300, 5, FULL)
    assert is_anchor_due(100, int(ANCHOR_SHARE * FULL), 5, FULL)
    assert is_anchor_due(int(ANCHOR_SHARE * FULL) + 1, 0, 0, FULL)
    assert not is_anchor_due(1, 0, CHAIN_LIMIT - 1, FULL)
    assert is_anchor_due(1, 0, CHAIN_LIMIT, FULL)


@pytest.mark.parametrize(
    ("wanted", "hosts", "stay"),
    [
        (5, [], {4, 5}),
        (4, [], {4, 5}),
        (3, [], {1, 2, 3, 4, 5}),
        (5, [had(5)], {4, 5}),
        (5, [had(3)], {4, 5}),
        (5, [had(2)], {3, 4, 5}),
        (5, [had(1)], {2, 3, 4, 5}),
        (5, [Content(2, "another")], {4, 5}),
        (9, [], {4, 5}),
    ],
)
def test_versions_that_stay(wanted: int, hosts: list[Content], stay: set[int]) -> None:
    assert needed_versions(PLAIN.values(), wanted, hosts) == stay


def test_versions_of_an_earlier_run_go() -> None:
    published = [PLAIN[4], PLAIN[5], Version(3, "again", FULL)]
    assert needed_versions(published, 3, [had(5)]) == {3}
    assert needed_versions([], 3, []) == set()


numbers = st.integers(1, 12)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 400)), min_size=1, max_size=12),
    st.one_of(st.none(), numbers),
    numbers,
    st.lists(numbers, max_size=3),
)
def test_what_stays_is_enough(made: list[tuple[bool, int]], has: int | None, wanted: int, hosts: list[int]) -> None:
    published = chain(*((number, full, delta_bytes) for number, (full, delta_bytes) in enumerate(made, 1)))
    stay = needed_versions(published.values(), wanted, [had(one) for one in hosts])
    kept = {number: published[number] for number in stay}
    ends = {wanted, len(made)} & published.keys()
    for start in (None, *map(had, hosts)):
        for end in ends:
            best = find_route(published.get, start, had(end))
            assert find_route(kept.get, start, had(end)) == best
    route = find_route(published.get, None if has is None else had(has), had(wanted))
    if route is not None and not route.back:
        at = has if route.anchor is None else route.anchor
        assert route.anchor is None or published[route.anchor].full_bytes is not None
        for version in route.deltas:
            assert published[version].base == at
            at = version
        assert at == wanted
