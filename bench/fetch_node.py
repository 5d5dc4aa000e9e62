"""A service of bench/fetch.py whose node keeps the trajectories: brokers, one node's broker, and emulated stages."""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import cycle
from typing import TYPE_CHECKING, Self

import msgspec
from node_service import NodeService

from prorl_zmq import Job, RolloutClient, Trajectory
from prorl_zmq.client.block_fetcher import BlockFetcher
from prorl_zmq.data.trajectory import array_views
from prorl_zmq.security.keyring import CLIENT, Keyring
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.system.run_folder import own_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from prorl_zmq.data.trajectory import TokenArrays
    from prorl_zmq.wire.messages.jobs import RecordForm

TOPOLOGY = '[rollout_broker]\nkeep = "node"\nmax_session_share = 1.0\n'
HANDLES = 64
"""Kept blocks that are fetched in turns."""
WAIT_S = 60.0


class KeepingService:
    """Holds `count` finished jobs to collect, and `handles` more, for as long as its context.

    `play` starts what plays the stage processes of a run folder, and returns what ends it.
    """

    def __init__(
        self, folder: Path, count: int, play: Callable[[Path], Callable[[], None]], handles: int = HANDLES
    ) -> None:
        self._folder = folder
        self._count = count
        self._held = handles
        self._play = play
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            service = opened.enter_context(NodeService(self._folder, TOPOLOGY))
            run_dir = own_run_dir(self._folder / "node")
            place = ("--node", "one", "--address", "127.0.0.1", "--run-dir", str(run_dir))
            self._service = service
            service.start("node", (), "broker", "node", "--service", str(service.path), *place)
            opened.callback(self._play(run_dir))
            self._client, other = (
                opened.enter_context(RolloutClient(service=service.path, timeout_s=WAIT_S)) for _ in range(2)
            )
            self._before = service.broker()
            for client, count in ((self._client, self._count), (other, self._held)):
                client.submit(Job(task="fetch", instance={}, stage_wait_s=WAIT_S) for _ in range(count))
            until = time.monotonic() + WAIT_S
            while other.status().uncollected < self._count + self._held:
                if time.monotonic() > until:
                    raise TimeoutError(f"the jobs did not end:\n{service.log('node')}")
                time.sleep(0.05)
            held = [one.result.kept for one in other.collect(self._held)]  # never acknowledged, so they stay
            self._handles = cycle(handle for handle in held if handle is not None)
            self._fetcher = BlockFetcher(Keyring.load(ServiceFolder.open(service.path).keys("client"), CLIENT))
            opened.callback(self._fetcher.close)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def mapped(self, tokens: int, turns: int, records: Sequence[RecordForm] = ()) -> TokenArrays:
        """Fetch a kept block as a client of the same machine does."""
        return array_views(self._fetcher.fetch({"": next(self._handles)})[""].buffer, tokens, turns, records)

    def broker_cpu_s(self) -> float:
        """Give the rollout broker's CPU time since before the first job."""
        now, before = self._service.broker(), self._before
        return now.main_s + now.other_s - before.main_s - before.other_s

    def over_tcp(self, tokens: int, turns: int) -> TokenArrays:
        """Fetch a kept block as a client of another machine does."""
        handle = msgspec.structs.replace(next(self._handles), socket="")
        return array_views(self._fetcher.fetch({"": handle})[""].buffer, tokens, turns)

    def collected(self) -> Trajectory:
        """Take a result from the broker, and its block from the node."""
        (trajectory,) = self._client.collect(1, wait_s=10)
        return trajectory
