"""What a node's stage processes hold, for which rollout broker."""

from __future__ import annotations

import pytest

from prorl_zmq.brokers.node.node_table import HeldPhase, NodeTable
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import MemberAlive, StageReport, StartPhase, Task

LEASE_S, QUIET_S = 10.0, 2.5


def report(stage_id: str = "run-1", slots: int = 2, **more: object) -> StageReport:
    role = Phase(stage_id.partition("-")[0])
    place = {"node": "n", "endpoint": "ipc://stage"}
    return StageReport(stage_id=stage_id, role=role, slots=slots, tasks=(Task("math"),), **place, **more)  # type: ignore[arg-type]


@pytest.fixture
def table() -> NodeTable:
    table = NodeTable(LEASE_S, QUIET_S)
    for stage_id in ("run-1", "run-2"):
        table.reported(report(stage_id), 0.0, "a")
    return table


def start(table: NodeTable, broker: str = "a", job_id: str = "j", attempt: int = 1) -> HeldPhase | None:
    return table.start(broker, StartPhase(job_id=job_id, attempt=attempt, phase=Phase.RUN), "math")


def held(table: NodeTable, **which: object) -> HeldPhase:
    found = start(table, **which)  # type: ignore[arg-type]
    assert isinstance(found, HeldPhase)
    return found


def test_the_least_loaded_process_gets_a_phase_until_no_slot_is_left(table: NodeTable) -> None:
    assert {held(table, job_id="j1").stage_id, held(table, job_id="j2").stage_id} == {"run-1", "run-2"}
    held(table, job_id="j3")
    held(table, job_id="j4")
    assert start(table, job_id="j5") is None
    assert table.used(Phase.RUN) == {"a": 4}


def test_a_task_that_nobody_here_serves_is_refused(table: NodeTable) -> None:
    assert table.start("a", StartPhase(job_id="j", attempt=1, phase=Phase.RUN), "chess") is None


def test_a_phase_runs_once_its_process_has_said_so(table: NodeTable) -> None:
    one = held(table)
    assert table.running("a") == {}
    alive = MemberAlive(member=one.stage_id, number=1, began={one.stage_id: {"j": 1}})
    assert table.alive(alive, 1.0)
    assert table.running("a") == {Phase.RUN: {"j": 1}}
    assert table.running("b") == {}


def test_a_job_of_another_broker_with_the_same_id_waits(table: NodeTable) -> None:
    one = held(table)
    assert start(table, broker="b") is None
    assert table.used(Phase.RUN) == {"a": 1}
    table.ended(one.stage_id, "j", 1)
    assert held(table, broker="b").broker == "b"


def test_a_newer_attempt_takes_the_place_of_the_older_one(table: NodeTable) -> None:
    one = held(table)
    two = held(table, attempt=2)
    assert table.holder("a", "j", 1) is None
    assert table.holder("a", "j", 2) == two.stage_id
    table.ended(one.stage_id, "j", 1)
    assert table.used(Phase.RUN) == {"a": 1}


def test_what_a_dead_process_held_is_returned_after_its_lease(table: NodeTable) -> None:
    one = held(table)
    other = "run-2" if one.stage_id == "run-1" else "run-1"
    table.reported(report(other), LEASE_S - 1, "a")
    assert table.expire(LEASE_S - 0.1) == {}
    assert table.expire(LEASE_S) == {one.stage_id: [one]}
    assert table.slots(Phase.RUN) == 2


def test_a_new_node_broker_takes_up_what_its_processes_have() -> None:
    table = NodeTable(LEASE_S, QUIET_S)
    table.reported(report(running={"j": 2}, ended={"k": 1}, origins={"j": "b"}), 0.0, "a")
    assert table.running("b") == {Phase.RUN: {"j": 2}}
    assert table.running("a") == {Phase.RUN: {"k": 1}}
    assert start(table, job_id="l") is None


def test_a_lost_heartbeat_is_noticed(table: NodeTable) -> None:
    assert not table.alive(MemberAlive(member="run-1", number=2), 1.0)
    assert table.alive(MemberAlive(member="run-1", number=3), 1.0)
    assert not table.alive(MemberAlive(member="run-9", number=1), 1.0)


def test_a_pool_drains_when_all_of_its_processes_do(table: NodeTable) -> None:
    table.reported(report("run-1", draining=True), 1.0, "a")
    assert not table.is_draining(Phase.RUN)
    assert table.slots(Phase.RUN) == 2
    table.reported(report("run-2", draining=True), 1.0, "a")
    assert table.is_draining(Phase.RUN)
