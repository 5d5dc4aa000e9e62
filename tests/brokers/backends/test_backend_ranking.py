from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.backends.backend_ranking import BackendRanking
from prorl_zmq.wire.messages.backends import Backend

NAMES = ["v", "w", "x", "y", "z"]
NODES = ["here", "there"]
PLACES = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from(NODES),
    st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    st.integers(1, 4),
    st.integers(0, 5),
)


def backend(name: str, node: str = "here", weight: float = 1.0, limit: int = 256) -> Backend:
    return Backend(backend_id=name, endpoint=f"ipc://{name}", node=node, weight=weight, max_in_flight=limit)


def test_nothing_is_first_of_nothing() -> None:
    ranking = BackendRanking()
    assert ranking.first("here") is None
    ranking.place(backend("x"), 0)
    ranking.discard("x")
    ranking.discard("x")
    assert ranking.first("here") is None


def test_a_backend_with_room_comes_before_a_full_one() -> None:
    ranking = BackendRanking()
    ranking.place(backend("full", limit=1), 1)
    assert ranking.first("here") == "full"
    ranking.place(backend("busy"), 9)
    assert ranking.first("here") == "busy"


def test_only_a_rollout_that_has_begun_gets_a_closed_backend() -> None:
    ranking = BackendRanking()
    ranking.place(backend("closed"), 0, closed=True)
    assert ranking.first("here") is None
    assert ranking.first("here", begun=True) == "closed"
    ranking.place(backend("full", "there", limit=1), 9)
    assert ranking.first("here") == "full"
    assert ranking.first("here", begun=True) == "full"
    ranking.place(backend("closed"), 0)
    assert ranking.first("here") == "closed"


def test_the_jobs_node_is_preferred_as_long_as_that_makes_no_imbalance() -> None:
    ranking = BackendRanking()
    ranking.place(backend("far", "there"), 2)
    ranking.place(backend("near"), 3)
    assert ranking.first("here") == "near"
    assert ranking.first("there") == "far"
    assert ranking.first("elsewhere") == "far"
    ranking.place(backend("near"), 4)
    assert ranking.first("here") == "far"
    ranking.place(backend("near", weight=2.0), 5)
    assert ranking.first("here") == "near", "one of its assignments is half a load"
    ranking.place(backend("near", weight=2.0), 6)
    assert ranking.first("here") == "far"


def test_a_full_backend_is_not_preferred_for_its_node() -> None:
    ranking = BackendRanking()
    ranking.place(backend("far", "there"), 2)
    ranking.place(backend("near", limit=1), 1)
    assert ranking.first("here") == "far"


def test_a_backend_that_moved_is_near_where_it_is_now() -> None:
    ranking = BackendRanking()
    ranking.place(backend("mover"), 3)
    ranking.place(backend("other", "there"), 2)
    assert ranking.first("here") == "mover"
    ranking.place(backend("mover", "elsewhere"), 3)
    assert ranking.first("here") == "other"
    assert ranking.first("elsewhere") == "mover"


@given(
    st.lists(PLACES | st.sampled_from(NAMES), max_size=60),
    st.sampled_from([*NODES, "elsewhere"]),
    st.sets(st.sampled_from(NAMES)),
)
def test_agrees_with_a_search_from_end_to_end(
    changes: list[tuple[str, str, float, int, int] | str], node: str, lacking: set[str]
) -> None:
    ranking = BackendRanking()
    model: dict[str, tuple[tuple[int, float, int], str, float]] = {}
    for sequence, change in enumerate(changes):
        if isinstance(change, str):
            ranking.discard(change)
            model.pop(change, None)
        else:
            name, where, weight, limit, in_flight = change
            ranking.place(backend(name, where, weight, limit), in_flight)
            tier = 1 if in_flight >= limit else 0
            model[name] = ((tier, in_flight / weight, sequence), where, (in_flight - 1) / weight)
        for excluded in (set[str](), lacking):
            there = {one: place for one, place in model.items() if one not in excluded}
            expected = min(there, key=lambda one: model[one][0], default=None)
            if expected is not None:
                bound = model[expected][0][1]
                near = [one for one, (rank, where, _) in there.items() if where == node and not rank[0]]
                nearest = min(near, key=lambda one: model[one][0], default=None)
                if nearest is not None and model[nearest][2] <= bound:
                    expected = nearest
            assert ranking.first(node, excluded.__contains__) == expected
        assert ranking.first(node) == ranking.first(node, set[str]().__contains__)
    assert set(ranking._on_node) == {where for rank, where, _ in model.values() if not rank[0]}
