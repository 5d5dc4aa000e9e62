"""Metrics of a whole service, as Prometheus gets them: `prorl serve` with real jobs, and processes that are killed."""

from __future__ import annotations

import os
import signal
import urllib.request
from typing import TYPE_CHECKING

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.ports import free_port
from support.services import PROCESS, serving
from support.waiting import until

from prorl_zmq import EpisodeLimits, Job, RolloutClient, Sampling
from prorl_zmq.config import GatewaySettings, MetricsSettings, Topology
from prorl_zmq.metrics.report import FLUSH_S
from prorl_zmq.service.child_plans import plan_brokers, plan_children, plan_node
from prorl_zmq.service.process_plans import HttpPlan
from prorl_zmq.service.service_folder import ServiceFolder

if TYPE_CHECKING:
    from pathlib import Path

    from support.services import Service

    from prorl_zmq.wire.messages.front_door import ServiceStatus

NO_MATH = frozenset({("task", "math"), ("outcome", "completed"), ("code", "")})
"""The row of a task's jobs, which is there before the first one ends."""
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scraped:
    """What one address gives."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"

    def samples(self) -> Samples:
        with urllib.request.urlopen(self.url, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            families = text_string_to_metric_families(answer.read().decode())
        return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}

    def value(self, name: str, **labels: str) -> float:
        """A sample, or 0; of fewer labels, the sum."""
        wanted = set(labels.items())
        return sum(value for (one, have), value in self.samples().items() if one == name and wanted <= have)


def agree(scraped: Scraped, status: ServiceStatus) -> bool:
    pairs = [
        (scraped.value("prorl_jobs", state="queued"), sum(status.queued.values())),
        (scraped.value("prorl_jobs", state="held"), sum(status.running.values())),
        (scraped.value("prorl_slots"), sum(stage.slots for stage in status.stages)),
        (scraped.value("prorl_slots_busy"), sum(stage.busy for stage in status.stages)),
        (scraped.value("prorl_results_uncollected"), status.uncollected),
        (scraped.value("prorl_phases_redelivered_total"), status.redelivered),
        (scraped.value("prorl_blocks_lost_total"), status.lost_blocks),
        *((scraped.value("prorl_jobs_ended_total", outcome=outcome), n) for outcome, n in status.outcomes.items()),
    ]
    return all(metric == number for metric, number in pairs)


def run_jobs(client: RolloutClient, count: int, **instance: str) -> None:
    given = {"problem": "1 + 1", "ground_truth": "2", **instance}
    client.submit([Job(task="math", instance=given, sampling=Sampling(max_tokens=4)) for _ in range(count)])
    assert len(list(client.stream())) == count


@pytest.mark.proof
@pytest.mark.timeout(180)
def test_metrics_of_a_service_agree_with_its_status_and_outlive_its_processes() -> None:
    port = free_port()
    bound = f'[metrics]\nbind = "127.0.0.1:{port}"\n'
    with serving(PROCESS + bound) as service, RolloutClient(service.front_door) as client:
        scraped = Scraped(port)
        until(lambda: ("prorl_jobs_ended_total", NO_MATH) in scraped.samples(), "a row of 0", 10)
        run_jobs(client, 5)
        no_room = EpisodeLimits(max_tokens=1)
        client.submit(Job(task="math", instance={"problem": "1", "ground_truth": "1"}, episode=no_room))
        assert [trajectory.outcome for trajectory in client.stream()] == ["failed"]
        until(lambda: agree(scraped, client.status()), "the numbers of `prorl status`", 10)
        assert scraped.value("prorl_jobs_submitted_total", task="math") == 6
        assert scraped.value("prorl_jobs_ended_total", outcome="failed", code="invalid_job") == 1
        # Each process reports at its own time.
        until(
            lambda: scraped.value("prorl_phase_failures_total", phase="run", code="invalid_job") == 1, "RUN's failure"
        )
        until(lambda: scraped.value("prorl_phase_seconds_count", phase="run", task="math") == 6, "RUN's seconds")
        until(lambda: scraped.value("prorl_phase_seconds_count", phase="eval", task="math") == 5, "EVAL's seconds")
        until(lambda: scraped.value("prorl_engine_tokens_total", kind="generated") >= 5, "the engine's tokens")
        until(lambda: scraped.value("prorl_backends", state="ready") == 1, "the backend broker's gauge")
        assert scraped.value("prorl_queue_seconds_count", phase="run") >= 5
        fork_server = service.child("fork_server_process")  # the one process that has nothing to report
        children = {one.pid for one in psutil.Process(service.process.pid).children()}
        reporting = {service.process.pid, *children} - {fork_server}
        assert scraped.value("prorl_processes") == len(reporting)
        stage_process_is_killed(service, scraped)
        broker_is_killed(service, scraped, client)


def stage_process_is_killed(service: Service, scraped: Scraped) -> None:
    """It leaves no gauge behind, not even for a second, and what it counted stays."""
    counted = scraped.value("prorl_phase_seconds_count", phase="run")
    victim = psutil.Process(service.child("stage_run.json"))
    victim.kill()
    victim.wait(10)
    until(lambda: scraped.value("prorl_processes", process="stage_run") == 0, "its gauge to go", 5 * FLUSH_S)
    until(lambda: scraped.value("prorl_processes", process="stage_run") == 1, "its successor")
    assert scraped.value("prorl_process_restarts_total", process="stage_run") == 1
    assert scraped.value("prorl_phase_seconds_count", phase="run") == counted


def broker_is_killed(service: Service, scraped: Scraped, client: RolloutClient) -> None:
    """Its successor counts from nothing, and the counters go on from where they were."""
    ended = scraped.value("prorl_jobs_ended_total")
    os.kill(service.child("rollout_broker.json"), signal.SIGKILL)
    run_jobs(client, 2)
    until(lambda: scraped.value("prorl_jobs_ended_total") == ended + 2, "two more jobs", 10)
    assert sum(client.status().outcomes.values()) == 2
    until(lambda: scraped.value("prorl_jobs") == 0, "no job")
    assert scraped.value("prorl_processes", process="rollout_broker") == 1
    assert scraped.value("prorl_slots", role="eval") == 8


BOUND = MetricsSettings("127.0.0.1:9464")


@pytest.mark.parametrize("gateway", ["", "127.0.0.1:8080"])
def test_who_serves_metrics_is_planned_once(gateway: str) -> None:
    topology = Topology(metrics=BOUND, gateway=GatewaySettings(gateway))
    plans = [plan for plan in plan_children(topology) if plan.process == "metrics"]
    assert [plan.name for plan in plans] == ["metrics"]
    assert isinstance(plans[0], HttpPlan)
    assert not plans[0].front_door
    assert [plan for plan in plan_children(Topology()) if plan.name == "metrics"] == []


def test_each_node_of_a_service_serves_its_own(tmp_path: Path) -> None:
    folder = ServiceFolder.create(tmp_path / "service", None)
    topology = Topology(metrics=BOUND)
    plans = [*plan_brokers(topology, folder, "127.0.0.1"), *plan_node(topology, folder, "127.0.0.1")]
    (plan,) = [plan for plan in plans if plan.name == "metrics"]
    assert isinstance(plan, HttpPlan)
    assert (plan.settings.bind, plan.service) == (BOUND.bind, str(folder.path))


def test_processes_are_named_by_what_they_are(tmp_path: Path) -> None:
    folder = ServiceFolder.create(tmp_path / "service", None)
    topology = Topology(metrics=BOUND, gateway=GatewaySettings("127.0.0.1:8080"))
    plans = [*plan_brokers(topology, folder, "127.0.0.1"), *plan_node(topology, folder, "127.0.0.1")]
    assert {plan.process for plan in plans} == {
        *("backend_broker", "rollout_broker", "node_broker", "engine", "gateway", "metrics"),
        *("stage_init", "stage_run", "stage_eval"),
    }
