"""What room costs the brokers: jobs of one turn on engines that report KV figures, and on engines that report none.

Two pairs of services, whose jobs run in turns. One pair has room for all RUN slots. In the other, one service's room is
half of its RUN slots, so jobs wait for room in the backend broker, and the other service has only half of the RUN
slots, so jobs wait in the rollout broker. Engines answer at once with one token, so the brokers' own work is measured.
Their journals are in memory, which would cost both the same. A turn is short, since other load on the machine changes
the cost of a message. The CPU time is that of all threads of both brokers, heartbeats included.
`scheduling_cost.py BACKEND_BROKER ENDPOINT ROOM` is such an engine; ROOM 0: it reports nothing.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import uvloop
import zmq
from frontdoor import SLOTS, cpu_s
from harness import Row
from service import BenchService

from prorl_zmq import Job, RolloutClient, Sampling
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.kv_figures import KvFigures
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import IM_END
from prorl_zmq.system.processes import stop_signals
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from prorl_zmq.inference.engine import EngineDescription

COST = "brokers' CPU of a job of one turn"
BROKERS = ("backend broker", "rollout broker")
GROUP = 8
MORE = 1.02
MOST_ROOM = 4 * SLOTS
CAPACITY_TOKENS, USED = 10**9, 0.5
"""Of the KV cache, which never fills: the engine's slots are its room."""
JOBS = 256
"""Of a turn."""
WAIT_S = 120.0


class Side(NamedTuple):
    name: str
    run_slots: int
    room: int
    """0: its engine reports nothing."""


PAIRS = (
    (Side("no KV figures", SLOTS, 0), Side("room for all RUN slots", SLOTS, MOST_ROOM)),
    (
        Side("no KV figures, half of the RUN slots", SLOTS // 2, 0),
        Side("room for half of the RUN slots", SLOTS, SLOTS // 2),
    ),
)


class InstantEngine(EmbeddedEngine):
    """An embedded engine in all but its generations and its KV figures.

    Args:
        kv: whether it reports KV figures.
    """

    def __init__(self, *, kv: bool) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._kv = kv

    @property
    def description(self) -> EngineDescription:
        return replace(super().description, kv=self._kv)

    def kv_figures(self, now: float) -> KvFigures:
        del now
        return KvFigures(CAPACITY_TOKENS, USED, 0, 0)

    async def generate(self, *_: object) -> Generation:
        """End the turn."""
        span = VersionSpan(self.weight_version, 0, 1)
        return Generation(np.array([IM_END], np.int32), np.zeros(1, np.float32), (span,), "stop")


def cost_rows(turns: int) -> list[Row]:
    """Measure both pairs.

    Args:
        turns: of each service of the first pair; those of the second pair get a quarter.
    """
    return _pair_rows(PAIRS[0], turns, has_target=True) + _pair_rows(PAIRS[1], max(1, turns // 4), has_target=False)


def _pair_rows(pair: tuple[Side, Side], turns: int, *, has_target: bool) -> list[Row]:
    with ExitStack() as stack:
        services = [stack.enter_context(_service(side)) for side in pair]
        for service, side in zip(services, pair, strict=True):
            service.start_engine(__file__, service.backend_broker, f"ipc://{service.folder}/engine", str(side.room))
            _pass(service)
            _pass(service)
        before = np.array([_cpu_s(service) for service in services])
        for turn in range(turns):
            for service in services[:: -1 if turn % 2 else 1]:
                _pass(service)
        spent = np.array([_cpu_s(service) for service in services]) - before
    per_job = 1e6 * spent / (turns * JOBS)
    rows: list[Row] = []
    for what, costs in ((COST, per_job.sum(1)), (f"{COST}, of it the backend broker's", per_job[:, 0])):
        without, with_it = (float(one) for one in costs)
        ratio = with_it / without
        target = (f"at most {MORE:g}×", ratio <= MORE) if has_target and what == COST else ("", None)
        rows.append(Row(f"{what}: {pair[0].name}", without, "µs"))
        rows.append(Row(f"{what}: {pair[1].name}", with_it, "µs", pair[0].name, ratio, *target))
    return rows


def _service(side: Side) -> BenchService:
    return BenchService([("init", SLOTS), ("run", side.run_slots), ("eval", SLOTS)], in_memory=True)


def _pass(service: BenchService) -> None:
    sampling = Sampling(max_tokens=1)
    groups = [new_id() for _ in range(JOBS // GROUP)]
    with RolloutClient(service.front_door, timeout_s=WAIT_S) as client:
        client.submit(
            Job(task="converse", instance={}, group_id=group, sampling=sampling)
            for group in groups
            for _ in range(GROUP)
        )
        collected = sum(trajectory.reward == 1.0 for trajectory in client.stream(timeout_s=WAIT_S))
        assert collected == JOBS


def _cpu_s(service: BenchService) -> list[float]:
    pids = service.pids()
    return [cpu_s(pids[name]) for name in BROKERS]


async def serve(backend_broker: str, endpoint: str, room: int) -> None:
    """Serve an engine until SIGTERM."""
    stop = asyncio.Event()
    options = HostOptions(
        endpoint=endpoint, backend_broker=backend_broker, backend_id="engine", max_in_flight=room or MOST_ROOM
    )
    with stop_signals(stop.set), zmq.Context() as context:
        await EngineHost(context, InstantEngine(kv=room > 0), options).run(stop)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
