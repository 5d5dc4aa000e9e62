"""A service of four nodes and two rollout brokers under load, with the strikes of bench/chaos.py and more.

`prorl serve` is on the host `hub`, `prorl node` on each of the others (chaos_nodes.py), all of one service folder, with
its keys. Each rollout broker has a trainer with its own session; both write one ledger. In addition to single
processes, whole nodes are killed (they restart at once under their names, before their old leases expire), stopped and
cut off. Journals, trajectories' segments, sandboxes and the service's folder are on one small disk, which is filled
too. Jobs, account and remains are bench/chaos.py's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from chaos import flags, image_of, measure, parsed
from chaos_nodes import HUB_HOST, NamespaceNodes
from chaos_pipeline import START_S, Pipeline
from chaos_plan import CLUSTER_KILLED, CLUSTER_LASTING, plan_strikes
from harness import Incomplete, report

from prorl_zmq.service.service_folder import ServiceFolder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from chaos_pipeline import Keeper
    from chaos_plan import Strike
    from harness import Row

NODES, BROKERS = 4, 2
ENGINES = 2
"""Nodes with an engine."""
TOPOLOGY = """\
[service]
rollout_brokers = {brokers}

[rollout_broker]
{keep}

[sandbox]
kind = "{sandbox}"
image = "{image}"

[[backends]]
kind = "saboteur"
model = "{model}"
"""


class Cluster(Pipeline):
    """The service; `start` it, and `close` it.

    Args:
        keep: where trajectories stay, `rollout_broker.keep` of the topology; empty: its default.
    """

    def __init__(self, sandbox: str, image: str, keep: str) -> None:
        super().__init__(sandbox, image, "namespaces")
        self._keep_at = keep
        self.far_nodes = tuple(f"n{number}" for number in range(1, NODES + 1))
        self.run_dirs = {node: self.disk / node for node in ("hub", *self.far_nodes)}
        self._service = self.disk / "service"

    async def _start_service(self) -> None:
        topology = self.folder / "topology.toml"
        keep = f'keep = "{self._keep_at}"' if self._keep_at else ""
        given = {"sandbox": self._sandbox, "image": self._image, "model": self.weights}
        topology.write_text(TOPOLOGY.format(brokers=BROKERS, keep=keep, **given))
        sys.path.append(str(self._packages))  # the topology is checked here
        self._folder = ServiceFolder.create(self._service, topology)
        self.nodes = nodes = NamespaceNodes(self.far_nodes)
        await nodes.start()
        place = ("--service", str(self._service), "--log-dir", str(self.logs), "--address")
        self._keep("serve", "hub", "prorl", "serve", "--brokers-only", *place, HUB_HOST)
        await asyncio.to_thread(self._folder.wait_for_brokers, START_S)
        for number, node in enumerate(self.far_nodes):
            logs = self.logs / node
            logs.mkdir()
            words = ("--name", node, "--log-dir", str(logs), *(() if number < ENGINES else ("--no-engines",)))
            self._keep(
                node, node, "prorl", "node", "--service", str(self._service), *words, "--address", nodes.hosts[node]
            )
        async with asyncio.timeout(START_S):
            while sum("ready: " in log.read_text() for log in self.logs.glob("n*.log")) < NODES:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def keep_trainers(self, seed: int, in_flight: int, until: float, hang_s: float) -> list[Keeper]:
        """Start a trainer for each rollout broker."""
        sessions = self._sessions(f"chaos-{seed}")
        return [
            self._keep_trainer(session, first, BROKERS, seed, in_flight, until, hang_s)
            for first, session in enumerate(sessions)
        ]

    def _sessions(self, name: str) -> list[str]:
        """Give a session of each rollout broker."""
        names = (f"{name}-{number}" for number in count())
        chosen: dict[str, str] = {}
        while len(chosen) < BROKERS:
            session = next(names)
            chosen.setdefault(self._folder.broker_of(session), session)
        return list(chosen.values())

    def _place(self) -> dict[str, str]:
        return {"service": str(self._service)}


def measure_cluster(arguments: argparse.Namespace) -> list[Row]:
    if os.geteuid() != 0:
        raise Incomplete("nodes are network namespaces, which want root", [])
    cluster = Cluster(arguments.sandbox, image_of(arguments.sandbox), arguments.keep_trajectories)
    return measure("chaos_cluster", cluster, planned(arguments), arguments)


def planned(arguments: argparse.Namespace) -> Sequence[Strike]:
    return plan_strikes(arguments.seed, arguments.minutes, CLUSTER_KILLED, CLUSTER_LASTING)


def main() -> None:
    about = "four nodes and two rollout brokers under load while processes, nodes, links and the disk fail"
    parser = flags("chaos_cluster", about)
    where = ("broker", "node")
    parser.add_argument("--keep-trajectories", choices=where, default="", help="where [default: the service's]")
    arguments = parsed(parser)
    report("chaos_cluster", about, arguments, partial(measure_cluster, arguments))


if __name__ == "__main__":
    main()
