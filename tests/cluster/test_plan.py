from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.cluster.plan import MAX_PAUSE_S, YOUNG_S, Brake, Plan, plan
from prorl_zmq.cluster.slurm import Allocation

STATES = ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING")


def job(number: int, state: str = "RUNNING", left_s: float | None = None) -> Allocation:
    return Allocation(f"1_{number}", str(100 + number), "1", state, "n1", left_s, "")


def test_what_is_missing_is_submitted() -> None:
    assert plan(4, 8, []) == Plan(4, ())
    assert plan(4, 8, [job(1), job(2, "PENDING"), job(3, "COMPLETING")]) == Plan(2, ())


def test_one_that_waits_leaves_first_then_the_one_with_the_least_time_left() -> None:
    jobs = [job(1, left_s=500), job(2, left_s=100), job(3, "PENDING"), job(4)]
    assert [one.name for one in plan(2, 8, jobs).leave] == ["1_3", "1_2"]


def test_a_node_that_was_told_to_leave_is_replaced_only_if_wanted() -> None:
    assert plan(2, 4, [job(1), job(2)], {"1_2"}) == Plan(1, ())
    assert plan(1, 4, [job(1), job(2)], {"1_2"}) == Plan(0, ())


def test_a_successor_comes_before_the_time_is_up_if_there_may_be_so_many() -> None:
    jobs = [job(1, left_s=50), job(2, left_s=5000)]
    assert plan(2, 3, jobs, soon_s=75) == Plan(1, ())
    assert plan(2, 2, jobs, soon_s=75) == Plan(0, ())
    assert plan(2, 3, jobs, soon_s=0) == Plan(0, ())


jobs_of = st.lists(st.tuples(st.sampled_from(STATES), st.none() | st.floats(0, 1000)), max_size=12).map(
    lambda rows: [job(number, state, left_s) for number, (state, left_s) in enumerate(rows)]
)


@given(st.integers(0, 10), st.integers(0, 20), jobs_of, st.sets(st.integers(0, 11)), st.sampled_from([0.0, 75.0]))
def test_a_plan_leads_to_what_is_wanted(
    wanted: int, limit: int, jobs: list[Allocation], told: set[int], soon_s: float
) -> None:
    leaving = {f"1_{number}" for number in told}
    made = plan(wanted, limit, jobs, leaving, soon_s)
    living = [one for one in jobs if not one.is_ending]
    assert made.submit == 0 or len(living) + made.submit <= limit
    assert not made.submit or not made.leave
    assert all(one in living and one.name not in leaving for one in made.leave)
    # Once what was submitted is there, and who was told has been noted, nothing is left to do.
    later = [*jobs, *(job(50 + number, "PENDING") for number in range(made.submit))]
    assert plan(wanted, limit, later, leaving | {one.name for one in made.leave}, soon_s) == Plan(0, ())


def test_jobs_that_end_young_are_replaced_ever_more_slowly() -> None:
    brake, now, pauses = Brake(15.0), 0.0, []
    for number in range(8):
        brake.note([job(number)], (), now)
        brake.note([], (), now + 5)
        start = now = now + 5
        while not brake.allows(now):
            now += 1
        pauses.append(now - start)
    assert pauses == [15, 30, 60, 120, 240, 480, MAX_PAUSE_S, MAX_PAUSE_S]


def test_one_that_grew_old_or_was_told_to_leave_is_replaced_at_once() -> None:
    brake = Brake(15.0)
    brake.note([job(1), job(2)], (), 0.0)
    brake.note([job(2)], {"1_2"}, YOUNG_S)
    assert brake.allows(YOUNG_S)
    brake.note([job(2), job(3)], {"1_3"}, YOUNG_S)
    brake.note([job(2)], {"1_3"}, YOUNG_S + 1)
    assert brake.allows(YOUNG_S + 1)
