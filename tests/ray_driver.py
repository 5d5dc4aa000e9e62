"""A Ray driver that trains the demo's policy through a service in its cluster, while a machine of three is lost.

Run by `tests/integrations/test_ray.py` in the environment of a trainer, which has the base package and Ray. It prints
what it saw as JSON, and waits to be killed. Without a topology it runs a program that it reads instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from support.demo_jobs import make_jobs

from prorl_zmq import Group
from prorl_zmq.demo.grpo import Grpo, Settings
from prorl_zmq.errors import ProrlError
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.integrations.ray import RayNode, RayService, start

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq import Trajectory

STEPS, GROUPS, GROUP_SIZE = 6, 4, 8
LOST_AT = 2
"""The step in which a machine is killed."""
LIMIT_S = 180.0


def until(what: Callable[[], Any]) -> float:
    """Wait until something holds; return how long that took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.2)
    return time.monotonic() - began


def main(python: str, topology: str, folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    machines = [cluster.add_node(num_cpus=1) for _ in range(3)]
    if not topology:  # the documents' example
        os.environ["RAY_ADDRESS"] = cluster.address
        exec(sys.stdin.read().replace("/opt/prorl/bin/python", python), {"__name__": "example"})
        return
    ray.init(address=cluster.address)
    seen: dict[str, Any] = {
        "too_many": refusal(nodes=4, topology=topology, python=python, wait_s=3),
        "wrong": refusal(topology=topology, python=python, slots={"judge": 1}),
    }
    began = time.monotonic()
    with start(3, topology=topology, slots={"run": 4}, python=python, drain_s=2) as service:
        seen["start_s"] = time.monotonic() - began
        first = service.nodes()
        seen["machines"] = len({node.ray_node_id for node in first})
        seen["folder"] = str(service.service)
        train(service, folder, seen, lambda: lose(cluster, machines, first))
        until(lambda: len(service.nodes()) == 3)
        seen["same"] = len({node.name for node in first} & {node.name for node in service.nodes()})
        service.scale(1)
        seen["left"] = len(service.nodes())
        for actor in (*service._actors(), service._brokers):
            pid = ray.get(actor.describe.remote()).pid
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid, actor=actor: (new := pid_of(actor)) and new != pid)
        with service.client() as client:
            client.submit(make_jobs(1, 8, 99))
            seen["outcomes"] += [str(each.outcome) for each in client.stream(timeout_s=60)]
        print(json.dumps(seen), flush=True)
        sys.stdin.read()  # to be killed


def pid_of(actor: Any) -> int:
    try:
        return int(ray.get(actor.describe.remote(), timeout=5).pid)
    except RayError:  # it is being restarted
        return 0


def refusal(**wrong: Any) -> str:
    try:
        start(**wrong)
    except ProrlError as error:
        return error.message
    return ""


def lose(cluster: Cluster, machines: list[Any], nodes: list[RayNode]) -> None:
    """Kill a machine that has a node, and bring another one."""
    cluster.remove_node(next(each for each in machines if each.node_id == nodes[0].ray_node_id), allow_graceful=False)
    cluster.add_node(num_cpus=1)


def train(service: RayService, folder: Path, seen: dict[str, Any], lose_one: Callable[[], None]) -> None:
    learner = Grpo(base_policy(), Settings(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE))
    seen["rewards"], seen["outcomes"] = [], []
    with service.client(timeout_s=15) as client:
        for step in range(STEPS):
            client.submit(make_jobs(GROUPS, GROUP_SIZE, step, name=f"step{step}"))
            if step == LOST_AT:
                lose_one()
            batch = list(client.stream(timeout_s=120))
            seen["rewards"].append(sum(each.reward or 0.0 for each in batch) / len(batch))
            learner.step(groups_of(batch))
            seen["outcomes"] += [str(each.outcome) for each in batch]
            until(lambda: updated(client, learner, folder))


def groups_of(batch: list[Trajectory]) -> list[Group]:
    names = sorted({each.group_id for each in batch})
    return [Group(name, name, tuple(each for each in batch if each.group_id == name)) for name in names]


def updated(client: Any, learner: Grpo, folder: Path) -> bool:
    """Have the engines load the new weights; those of a lost machine may still be listed."""
    try:
        client.update_weights(learner.save(folder), learner.weight_version)
    except ProrlError as error:
        print(f"again: {error.message}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
