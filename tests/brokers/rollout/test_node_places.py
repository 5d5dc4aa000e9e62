"""Which machine has a node's name: one living place at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.machines import few_and_many

from prorl_zmq.brokers.rollout.node_places import NodePlaces
from prorl_zmq.errors import ConfigError
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import StageReport

if TYPE_CHECKING:
    from hypothesis import settings


@dataclass
class Name:
    """One node's name, and who says to have it."""

    places: NodePlaces = field(default_factory=NodePlaces)
    heard: dict[str, float] = field(default_factory=dict)
    now: float = 0.0

    def report(self, member: str, place: str) -> bool:
        report = StageReport(
            stage_id=member, role=Phase.RUN, node="n", place=place, slots=1, endpoint="ipc://x", tasks=()
        )
        joined = self.places.joins(report, self.heard.get, self.now)
        if joined:
            self.heard[member] = self.now
        return joined

    def lose(self, member: str) -> None:
        self.heard.pop(member, None)
        self.places.left(member)


def test_a_second_machine_is_refused_once_the_first_is_heard() -> None:
    name = Name()
    assert name.report("run-1", "gpu-7:/tmp/a (1)")
    assert name.report("eval-1", "gpu-7:/tmp/a (1)")
    name.now = 1.0
    assert not name.report("run-2", "gpu-8:/tmp/a (2)")
    name.now = 1.5
    assert not name.report("run-2", "gpu-8:/tmp/a (2)")  # the first may be dead
    name.heard["eval-1"] = 1.6
    with pytest.raises(ConfigError, match=r"the name n is that of gpu-7:/tmp/a \(1\).* of gpu-8:/tmp/a \(2\) too"):
        name.report("run-2", "gpu-8:/tmp/a (2)")


def test_a_node_comes_back_once_its_old_lease_is_over() -> None:
    name = Name()
    assert name.report("run-1", "before the reboot")
    assert not name.report("run-2", "after it")
    name.lose("run-1")
    assert name.report("run-2", "after it")
    assert not name.report("run-1", "before the reboot")


def test_who_says_no_place_is_believed() -> None:
    name = Name()
    assert name.report("run-1", "here")
    assert name.report("run-2", "")


class OnePlace(RuleBasedStateMachine):
    """Whatever comes and goes, those that have joined and live are of one place."""

    def __init__(self) -> None:
        super().__init__()
        self.name = Name()
        self.joined: dict[str, str] = {}

    @rule(place=st.sampled_from("abc"), number=st.integers(0, 2))
    def report(self, place: str, number: int) -> None:
        self.name.now += 1
        member = f"{place}-{number}"
        try:
            if self.name.report(member, place):
                self.joined[member] = place
        except ConfigError:
            self.lose(member)

    @rule(place=st.sampled_from("abc"), number=st.integers(0, 2))
    def leave(self, place: str, number: int) -> None:
        self.lose(f"{place}-{number}")

    def lose(self, member: str) -> None:
        self.name.lose(member)
        self.joined.pop(member, None)

    @invariant()
    def one_place(self) -> None:
        assert len(set(self.joined.values())) <= 1


@few_and_many(10)
def test_one_place(runs: settings) -> None:
    run_state_machine_as_test(OnePlace, settings=runs)
