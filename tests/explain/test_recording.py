"""How busy the slots were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.explain.critical_path import critical_path
from prorl_zmq.explain.parts import CLIENT, HANDOVER
from prorl_zmq.explain.recording import slots_of_status
from prorl_zmq.explain.replay import Change, replay
from prorl_zmq.wire.messages.front_door import ServiceStatus, StageStatus
from prorl_zmq.wire.messages.jobs import Phase

from .recordings import SLOTS, passing, recording, rollout, work

JOBS = st.lists(
    st.tuples(
        st.floats(0.0, 10.0),
        st.fixed_dictionaries({name: st.floats(0.01, 5.0) for name in ("INIT", "engine", "tool.bash", "EVAL")}),
    ),
    min_size=1,
    max_size=25,
)


def test_slots_that_are_idle_while_others_are_waited_for() -> None:
    """Two jobs at a slot of RUN for two seconds each, while EVAL has nothing to do."""
    one = rollout("a", [work(Phase.RUN, 0.0, {"engine": 2.0})])
    two = rollout("b", [work(Phase.RUN, 2.0, {"engine": 2.0}, queued_at=0.0)])
    found = recording([one, two], slots={(Phase.RUN, "n"): 1, (Phase.EVAL, "n"): 3}).use
    assert found[Phase.RUN] == (Phase.RUN, 1, 1.0, 0.5, 0.5, 1.0, 0.0, 0)
    assert (found[Phase.EVAL].busy, found[Phase.EVAL].idle_while_others_waited) == (0.0, 3.0)


def test_slots_are_those_of_the_service_and_at_least_those_seen() -> None:
    def status(*stages: StageStatus) -> ServiceStatus:
        return ServiceStatus("r", stages=stages)

    first = status(StageStatus("a", Phase.RUN, "n", 1, 0), StageStatus("b", Phase.RUN, "n", 1, 0))
    known = slots_of_status(
        [first, status(StageStatus("a", Phase.RUN, "n", 1, 0), StageStatus("c", Phase.EVAL, "m", 8, 0))]
    )
    assert known == {(Phase.RUN, "n"): 2, (Phase.EVAL, "m"): 8}
    three = [rollout(str(n), [work(Phase.RUN, 0.0, {"engine": 1.0})]) for n in range(3)]
    assert recording(three, slots=known).slots == {(Phase.RUN, "n"): 3, (Phase.EVAL, "m"): 8}


@given(JOBS)
def test_the_critical_path_is_the_whole_time(jobs: list[tuple[float, dict[str, float]]]) -> None:
    made = recording(passing(sorted(jobs, key=lambda one: one[0])))
    path = critical_path(made)
    assert sum(path.parts.values()) == pytest.approx(made.wall_s)
    assert path.parts.keys() <= {"INIT", "engine", "tool.bash", "EVAL", CLIENT, HANDOVER}


def test_the_time_between_two_works_is_part_of_the_critical_path() -> None:
    works = [
        work(Phase.INIT, 0.0, {"INIT": 1.0}),
        work(Phase.RUN, 1.5, {"engine": 1.0}),
        work(Phase.EVAL, 3.0, {"EVAL": 1.0}),
    ]
    path = critical_path(recording([rollout("a", works)]))
    assert path.parts == {"INIT": 1.0, "engine": 1.0, "EVAL": 1.0, HANDOVER: 1.0}


@given(JOBS)
def test_a_replay_of_what_was_served_in_order_takes_as_long(jobs: list[tuple[float, dict[str, float]]]) -> None:
    """All at once: then the order of jobs and the arrivals are the same in the replay."""
    made = recording(passing([(0.0, parts) for _, parts in jobs], slots=1), slots=dict.fromkeys(SLOTS, 1))
    assert replay(made) == pytest.approx(made.wall_s)


@given(JOBS)
def test_no_replay_is_shorter_than_its_longest_rollout(jobs: list[tuple[float, dict[str, float]]]) -> None:
    made = recording(passing(sorted(jobs, key=lambda one: one[0])))
    longest = max(one.worked_s for one in made.rollouts)
    many = Change(slots=dict.fromkeys(Phase, 100.0), at_once=True)
    assert replay(made, many) == pytest.approx(longest)
    assert replay(made, Change(at_once=True)) >= longest * 0.999
    assert replay(made, Change(lambda _rollout, _work, _part: 0.0, at_once=True)) == 0.0
