"""What the brokers of a service say together. `test_node` asks real ones."""

from __future__ import annotations

from prorl_zmq.service.rollout_brokers import fates, summed
from prorl_zmq.wire.messages.front_door import ServiceStatus, StageStatus
from prorl_zmq.wire.messages.jobs import Outcome, Phase


def test_statuses_are_added_up_and_a_nodes_stage_is_one() -> None:
    def status(busy: int, *, uptime_s: float, tasks: tuple[str, ...]) -> ServiceStatus:
        return ServiceStatus(
            "r",
            stages=(StageStatus("run-n", Phase.RUN, "n", 8, busy),),
            queued={Phase.RUN: 2},
            outcomes={Outcome.COMPLETED: 5, Outcome.TIMEOUT: busy},
            uncollected=1,
            redelivered=3,
            tasks=tasks,
            uptime_s=uptime_s,
        )

    both = summed([status(1, uptime_s=9.0, tasks=("b", "a")), status(4, uptime_s=5.0, tasks=("b",))])
    assert both == ServiceStatus(
        "r",
        stages=(StageStatus("run-n", Phase.RUN, "n", 16, 5),),
        queued={Phase.RUN: 4},
        outcomes={Outcome.COMPLETED: 10, Outcome.TIMEOUT: 5},
        uncollected=2,
        redelivered=6,
        tasks=("a", "b"),
        uptime_s=5.0,
    )


def test_the_broker_that_has_a_job_says_what_became_of_it() -> None:
    told = [{"a": "unknown", "b": "finished", "c": "unknown"}, {"a": "cancelled", "b": "unknown", "c": "unknown"}]
    assert fates(told) == {"a": "cancelled", "b": "finished", "c": "unknown"}
