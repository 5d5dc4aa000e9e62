from __future__ import annotations

import msgspec
import pytest

from prorl_zmq.brokers.backends.backend_heap import BackendHeap
from prorl_zmq.errors import DuplicateBackend, UnknownBackend
from prorl_zmq.wire.messages.backends import Assign, Backend, HeldAssignment
from prorl_zmq.wire.messages.base import new_id


def backend(
    name: str, endpoint: str = "", version: int = 0, *, weight: float = 1.0, limit: int = 256, node: str = "local"
) -> Backend:
    return Backend(
        backend_id=name,
        endpoint=endpoint or f"ipc://{name}",
        weight_version=version,
        weight=weight,
        max_in_flight=limit,
        node=node,
    )


def heap_of(*names: str) -> BackendHeap:
    heap = BackendHeap()
    for name in names:
        heap.add(backend(name))
    return heap


def groups_of(*backends: Backend) -> BackendHeap:
    heap = BackendHeap("group")
    for one in backends:
        heap.add(one)
    return heap


def assign(
    heap: BackendHeap,
    job_id: str,
    attempt: int = 1,
    owner: str = "run-1",
    *,
    group: str = "",
    node: str = "local",
    leaving: str = "",
    request_id: str = "",
) -> str | None:
    given = heap.assign(
        Assign(
            request_id or new_id(),
            owner=owner,
            job_id=job_id,
            attempt=attempt,
            wait_s=1.0,
            group_id=group,
            node=node,
            leaving=leaving,
        )
    )
    return given.backend_id if given is not None else None


def in_flight(heap: BackendHeap) -> dict[str, int]:
    return {status.backend.backend_id: status.in_flight for status in heap.status()}


def states(heap: BackendHeap) -> dict[str, str]:
    return {status.backend.backend_id: status.state for status in heap.status()}


def test_no_backend_no_assignment() -> None:
    assert assign(BackendHeap(), "a") is None


def test_the_least_loaded_is_chosen_and_ties_go_to_the_longest_idle() -> None:
    heap = heap_of("x", "y")
    assert [assign(heap, job) for job in "abc"] == ["x", "y", "x"]
    heap.release("a", 1)
    heap.release("b", 1)
    # x: 1 in flight; y: none.
    assert [assign(heap, job) for job in "de"] == ["y", "x"]


def test_weight_is_assignments_in_flight_and_not_those_ever_made() -> None:
    heap = heap_of("x", "y")
    for job in "abcd":
        assign(heap, job)
    for job in "ac":  # both on x, which has served as many jobs as y
        heap.release(job, 1)
    assert [assign(heap, job) for job in "ef"] == ["x", "x"]
    assert [status.assigned for status in heap.status()] == [4, 2]


def test_a_job_keeps_its_backend() -> None:
    heap = heap_of("x", "y")
    assert assign(heap, "a") == "x"
    assert assign(heap, "a") == "x"
    assert assign(heap, "a", attempt=2, owner="run-2") == "x"
    assert in_flight(heap) == {"x": 1, "y": 0}


def test_a_draining_backend_keeps_its_jobs_and_gets_no_more() -> None:
    heap = heap_of("x", "y")
    assign(heap, "a")
    heap.drain("x")
    assert assign(heap, "a") == "x"
    assert assign(heap, "b") == "y"
    assert assign(heap, "c") == "y"
    assert assign(heap, "a", attempt=2) == "y"
    heap.drain("y")
    assert assign(heap, "d") is None
    heap.add(backend("x"))
    assert assign(heap, "d") == "x"


def test_an_older_attempt_changes_nothing() -> None:
    heap = heap_of("x", "y")
    assign(heap, "a", attempt=2)
    before = heap.status()
    assert assign(heap, "a", attempt=1, owner="run-2") == "x"
    assert not heap.release("a", 1)
    assert heap.status() == before


def test_removing_a_backend_frees_its_jobs_for_others() -> None:
    heap = heap_of("x", "y")
    assign(heap, "a")
    heap.remove("x")
    assert assign(heap, "a") == "y"
    heap.remove("y")
    assert heap.status() == ()
    assert assign(heap, "a") is None


def test_a_silent_owner_loses_all_and_a_live_one_what_it_does_not_name() -> None:
    heap = heap_of("x")
    for job in "abc":
        assign(heap, job, owner="run-1")
    assign(heap, "d", owner="run-2")
    heap.keep_only("run-1", {"a": HeldAssignment(1), "b": HeldAssignment(2)})  # b: of another attempt
    assert in_flight(heap) == {"x": 2}
    heap.drop_owner("run-1")
    heap.drop_owner("run-1")
    assert in_flight(heap) == {"x": 1}
    assert list(heap.owners()) == ["run-2"]


def test_ids_are_checked() -> None:
    heap = heap_of("x")
    with pytest.raises(DuplicateBackend) as duplicate:
        heap.add(backend("x", "ipc://elsewhere"))
    assert duplicate.value.backend == "x"
    for change in (heap.drain, heap.remove, lambda name: heap.set_weight_version(1, name)):
        with pytest.raises(UnknownBackend):
            change("unknown")
    assert "x" in heap
    assert "unknown" not in heap


def test_weight_versions_are_noted_of_one_or_all() -> None:
    heap = heap_of("x", "y")
    heap.set_weight_version(1)
    heap.set_weight_version(2, "y")
    assert [status.backend.weight_version for status in heap.status()] == [1, 2]
    given = heap.assign(Assign("ask", owner="run-1", job_id="a", attempt=1, wait_s=1.0))
    assert given is not None
    assert given.weight_version == 1


def test_a_backend_with_older_weights_than_needed_gets_jobs_once_it_has_caught_up() -> None:
    heap = heap_of("x")
    assign(heap, "a")
    heap.add(backend("x", version=1), needed_version=3)
    assert heap.member("x").known_version == 3
    assert assign(heap, "a") == "x", "what holds it keeps it"
    assert assign(heap, "b") is None
    heap.set_weight_version(2)
    assert [status.state for status in heap.status()] == ["behind"]
    heap.set_weight_version(3, "x")
    assert assign(heap, "b") == "x"
    heap.set_weight_version(1, "x")
    assert [status.state for status in heap.status()] == ["ready"], "a trainer may go back"
    assert heap.member("x").known_version == 1


def test_a_backend_that_has_caught_up_still_drains_if_it_was_asked_to() -> None:
    heap = heap_of()
    heap.add(backend("x"), needed_version=1)
    heap.drain("x")
    heap.set_weight_version(1)
    assert assign(heap, "a") is None


def test_a_backend_of_twice_the_weight_takes_twice_the_jobs() -> None:
    heap = BackendHeap()
    heap.add(backend("x", weight=2.0))
    heap.add(backend("y"))
    for number in range(9):
        assign(heap, f"job-{number}")
    assert in_flight(heap) == {"x": 6, "y": 3}


def test_full_backends_are_avoided_until_all_are() -> None:
    heap = BackendHeap()
    heap.add(backend("x", limit=1))
    heap.add(backend("y", limit=3))
    assert [assign(heap, job) for job in "abcd"] == ["x", "y", "y", "y"]
    assert assign(heap, "e") == "x", "the limit is soft: the least loaded takes more"
    heap.release("b", 1)
    assert assign(heap, "f") == "y"


def test_the_jobs_node_is_preferred() -> None:
    heap = BackendHeap()
    heap.add(backend("far", node="n1"))
    heap.add(backend("near", node="n2"))
    assert [assign(heap, job, node="n2") for job in "abcde"] == ["near", "near", "far", "near", "far"]


def test_a_group_stays_together_until_its_backend_is_full() -> None:
    heap = groups_of(backend("x", limit=2), backend("y", limit=2), backend("z"))
    assert [assign(heap, job, group="g") for job in "ab"] == ["x", "x"]
    assert assign(heap, "other", group="h") == "y"
    assert [assign(heap, job, group="g") for job in "cd"] == ["z", "z"], "the least loaded one has the rest of it"
    heap.release("a", 1)
    assert assign(heap, "e", group="g") == "x", "the earliest with room"
    heap.release("b", 1)
    heap.release("e", 1)
    for job in "cd":
        heap.release(job, 1)
    assert assign(heap, "f", group="g") == "x", "a group outlives its jobs"


def test_jobs_without_a_group_or_by_job_are_spread() -> None:
    heap = groups_of(backend("x"), backend("y"))
    assert [assign(heap, job) for job in "ab"] == ["x", "y"]
    heap = heap_of("x", "y")
    assert [assign(heap, job, group="g") for job in "ab"] == ["x", "y"]


@pytest.mark.parametrize("end", ["drain", "remove", "suspend"])
def test_a_group_moves_on_from_a_backend_that_is_draining_or_gone(end: str) -> None:
    heap = groups_of(backend("x"), backend("y"))
    assert assign(heap, "a", group="g") == "x"
    getattr(heap, end)("x", *(["it coughs"] if end == "suspend" else []))
    assert [assign(heap, job, group="g") for job in "bc"] == ["y", "y"]
    heap.add(backend("x"))
    assert assign(heap, "d", group="g") == "y", "where its prompt is now"


def test_a_job_that_cannot_go_on_with_its_backend_gets_another_one() -> None:
    heap = heap_of("x", "y", "z")
    assert [assign(heap, job) for job in "abc"] == ["x", "y", "z"]
    heap.suspend("x", "it coughs")
    assert assign(heap, "a", leaving="x") == "y"
    assert states(heap) == {"x": "probation", "y": "ready", "z": "ready"}
    assert in_flight(heap) == {"x": 0, "y": 2, "z": 1}
    assert [assign(heap, job) for job in "de"] == ["z", "y"], "an idle one on probation attracts no jobs"
    assert assign(heap, "a") == "y"
    heap.restore("x")
    heap.restore("x")
    assert assign(heap, "f") == "x"


def test_the_only_backend_is_given_again_unless_it_takes_no_jobs() -> None:
    heap = heap_of("x")
    assign(heap, "a")
    assert assign(heap, "a", leaving="x") == "x"
    for stop in ("drain", "suspend"):
        heap = heap_of("x")
        assign(heap, "a")
        getattr(heap, stop)("x", *(["it coughs"] if stop == "suspend" else []))
        assert assign(heap, "a", leaving="x") is None
        assert in_flight(heap) == {"x": 0}


def test_one_on_probation_is_tried_by_one_job_for_each_offer() -> None:
    heap = heap_of("x", "y")
    heap.suspend("x", "it coughs")
    assert assign(heap, "a") == "y"
    heap.offer("x")
    heap.offer("x")
    assert assign(heap, "b", leaving="z") == "x", "the job left what is gone"
    assert assign(heap, "c") == "y"
    heap.offer("x")
    assert [assign(heap, job) for job in "de"] == ["x", "y"]
    heap.offer("y")
    assert assign(heap, "f") == "y", "one that is ready needs no offer"
    heap.suspend("y", "it sneezes")
    heap.offer("x")
    assert assign(heap, "f", leaving="y") == "x", "nothing else is left"
    heap.offer("y")
    heap.drain("y")
    assert assign(heap, "g") is None
    assert [status.problem for status in heap.status()] == ["it coughs", "it sneezes"]


def test_a_job_that_moves_tries_none_while_another_is_ready() -> None:
    heap = heap_of("x", "y", "z")
    assert [assign(heap, job) for job in "ab"] == ["x", "y"]
    heap.suspend("x", "it coughs")
    heap.offer("x")
    assert assign(heap, "b", leaving="y") == "z"
    assert assign(heap, "c") == "x"


def test_one_on_probation_is_better_than_none() -> None:
    heap = heap_of("x", "y")
    assert [assign(heap, job) for job in "abc"] == ["x", "y", "x"]
    for name in "xy":
        heap.suspend(name, "it coughs")
    request = Assign("r", owner="run-1", job_id="d", attempt=1, wait_s=1.0)
    assert heap.assign(request) is None
    given = heap.assign(request, anyhow=True)
    assert given is not None
    assert given.backend_id == "y", "the least loaded"
    for name in "xy":
        heap.drain(name)
    assert heap.assign(Assign("s", owner="run-1", job_id="e", attempt=1, wait_s=1.0), anyhow=True) is None


def test_what_was_served_is_noted_once() -> None:
    heap = heap_of("x")
    heap.suspend("x", "it coughs")
    heap.offer("x")
    assign(heap, "a", attempt=2)
    assert heap.note_served("a", 2, 0) is None
    assert heap.note_served("a", 1, 1) is None
    assert heap.note_served("b", 1, 1) is None
    assert heap.note_served("a", 2, 1) == ("x", True)
    assert heap.note_served("a", 2, 1) is None
    heap.restore("x")
    assign(heap, "b")
    assert heap.note_served("b", 1, 3) == ("x", False)


def test_assignments_of_an_earlier_heap_are_adopted() -> None:
    heap = heap_of("x", "y")
    heap.adopt("run-1", "a", HeldAssignment(2, "x", 5))
    heap.adopt("run-1", "a", HeldAssignment(2, "y", 5))
    heap.adopt("run-1", "b", HeldAssignment(1))
    heap.adopt("run-1", "c", HeldAssignment(1, "gone"))
    assert in_flight(heap) == {"x": 1, "y": 0}
    assert heap.note_served("a", 2, 5) is None
    assert assign(heap, "a", attempt=2) == "x"
    assert assign(heap, "a", attempt=2, leaving="x") == "y"
    heap.drop_owner("run-1")
    assert in_flight(heap) == {"x": 0, "y": 0}


def test_a_request_that_came_twice_moved_the_job_on_twice() -> None:
    heap = heap_of("x", "y")
    assert assign(heap, "a") == "x"
    for _ in range(2):
        assert assign(heap, "a", leaving="x", request_id="again") == "y"
    heap.remove("y")
    for _ in range(2):
        assert assign(heap, "b", leaving="x", request_id="b") == "x", "the only one"
    assert in_flight(heap) == {"x": 1}


def test_what_an_older_attempt_could_not_reach_or_nobody_holds_changes_nothing() -> None:
    heap = heap_of("x", "y")
    assign(heap, "a", attempt=2)
    before = heap.status()
    assert assign(heap, "a", attempt=1, leaving="x") == "x"
    assert assign(heap, "a", attempt=2, leaving="y") == "x"
    assert assign(heap, "a", attempt=2, leaving="unheard-of") == "x"
    assert heap.status() == before


def test_adding_one_on_probation_again_makes_it_ready() -> None:
    heap = heap_of("x", "y")
    heap.suspend("x", "it coughs")
    heap.offer("x")
    heap.add(backend("x", node="n2", weight=4.0))
    assert states(heap) == {"x": "ready", "y": "ready"}
    assert [assign(heap, job, node="n2") for job in "ab"] == ["x", "x"]


def test_an_engine_without_room_gets_no_new_rollout_and_keeps_those_it_has() -> None:
    heap = heap_of("x")
    heap.set_room("x", 2)
    assert [assign(heap, job) for job in "abc"] == ["x", "x", None]
    heap.set_room("x", 1)
    assert assign(heap, "a") == "x"
    assert assign(heap, "b", attempt=2) == "x", "its next attempt keeps its place"
    heap.release("a", 1)
    assert assign(heap, "c") is None, "a smaller number ends no rollout"
    heap.release("b", 2)
    assert assign(heap, "c") == "x"
    heap.set_room("x", None)
    assert assign(heap, "d") == "x"


def test_jobs_go_where_room_is() -> None:
    heap = heap_of("x", "y")
    heap.set_room("x", 1)
    assert [assign(heap, job) for job in "abcd"] == ["x", "y", "y", "y"]
    heap = groups_of(backend("x"), backend("y"))
    heap.set_room("x", 1)
    assert [assign(heap, job, group="g") for job in "abc"] == ["x", "y", "y"]
    heap.release("a", 1)
    assert assign(heap, "d", group="g") == "x"


def test_a_rollout_that_leaves_an_engine_waits_for_room_on_another() -> None:
    heap = heap_of("x", "y")
    assert [assign(heap, job) for job in "ab"] == ["x", "y"]
    heap.set_room("y", 1)
    heap.suspend("x", "it is gone")
    assert assign(heap, "a", leaving="x") is None
    heap.release("b", 1)
    assert assign(heap, "a", leaving="x") == "y"


def test_a_job_that_left_goes_back_to_where_its_prompt_is() -> None:
    heap = heap_of("x", "y", "z")
    assert assign(heap, "a") == "x"
    assert assign(heap, "a", leaving="x") == "y"
    heap.adopt("run-1", "b", HeldAssignment(1, "x"))
    heap.warm.note_resident("x", ("a",))
    assert assign(heap, "a", leaving="y") == "x", "though z is idle"
    assert assign(heap, "c") == "z"


@pytest.mark.parametrize("trouble", ["none", "full", "closed", "draining", "leaving", "gone", "cleared", "other model"])
def test_a_job_whose_prompt_is_resident(trouble: str) -> None:
    heap = groups_of(backend("x", limit=2), backend("y", limit=100))
    heap.warm.note_resident("x", ())
    assign(heap, "m", group="other")
    heap.warm.note_resident("x", ("a", "b"))
    others = {"none": 1, "full": 2}
    for number in range(others.get(trouble, 1) - 1):
        heap.adopt("run-1", f"held-{number}", HeldAssignment(1, "x"))
    if trouble == "closed":
        heap.set_room("x", 1)
    elif trouble == "draining":
        heap.drain("x")
    elif trouble == "gone":
        heap.remove("x")
    elif trouble == "cleared":
        heap.warm.note_resident("x", ())
    elif trouble == "other model":
        heap.add(msgspec.structs.replace(backend("x", limit=2), name="judge"))
    expected = "x" if trouble == "none" else "y"
    assert in_flight(heap).get("x", 0) == (0 if trouble in ("gone", "other model") else others.get(trouble, 1))
    assert assign(heap, "a", leaving="x" if trouble == "leaving" else "") == expected


def test_members_of_a_group_follow_their_prompt() -> None:
    """The group used x first, but only y still has its prompt."""
    heap = groups_of(backend("x", limit=1), backend("y"))
    for name in "xy":
        heap.warm.note_resident(name, ())
    assert [assign(heap, job, group="g") for job in ("a", "b")] == ["x", "y"]
    heap.release("a", 1)
    assert assign(heap, "c", group="g") == "x", "the earliest one with room"
    heap.release("c", 1)
    heap.warm.note_resident("y", ("b",))
    assert assign(heap, "d", group="g") == "y"
    assert assign(heap, "e", group="h") == "x"
    heap.warm.note_resident("y", ())
    heap.release("e", 1)
    assert assign(heap, "f", group="g") == "x"


def test_of_several_with_the_prompt_the_least_loaded() -> None:
    heap = groups_of(backend("x", limit=1), backend("y"), backend("z", weight=4.0))
    for name in "xyz":
        heap.warm.note_resident(name, ())
    assign(heap, "a", group="g")
    for name, count in (("y", 2), ("z", 4)):
        for number in range(count):
            heap.adopt("run-1", f"{name}-{number}", HeldAssignment(1, name))
        heap.warm.note_resident(name, ("a",))
    assert assign(heap, "b", group="g") == "z"


def test_with_affinity_job_a_group_is_spread_as_ever() -> None:
    heap = heap_of("x", "y")
    heap.warm.note_resident("x", ())
    assign(heap, "a", group="g")
    heap.warm.note_resident("x", ("a",))
    assert assign(heap, "b", group="g") == "y"
