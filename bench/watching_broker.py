"""The rollout broker's cost of being watched: the empty pipeline with viewers, a scraper or traces, and without.

Both services are up at the same time and take turns, so that other load on the machine affects both. Phases do nothing,
so the broker does most of the work: the worst case.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import psutil
from frontdoor import SLOTS, throughput
from service import BenchService, free_port
from trace_collector import ENDPOINT, collector, jobs_traced

from prorl_zmq.metrics.report import OUTLET
from prorl_zmq.service.metrics_inbox import MetricsInbox

if TYPE_CHECKING:
    from collections.abc import Iterator

VIEWERS = 20
START_S = 45.0
WARM_UP = 200
"""Jobs before."""
SETTLE_S = 0.5
"""After each run of jobs, so that nothing of it is done during the next one."""
EXPORT_S = 6.0
"""By when the SDK has exported what it has; it waits for 5 s."""


class Cost(NamedTuple):
    """One way of looking, compared with none."""

    rate: float
    """Of jobs per second, the median of all rounds' ratios."""
    jobs_per_s: float
    cpu: float
    """Of the broker's CPU time for a job."""
    cpu_us: float


def viewers_cost(count: int, rounds: int) -> Cost:
    """Measure with viewers of the dashboard, all at one gateway."""
    with ExitStack() as stack:
        bare, watched = stack.enter_context(_service()), stack.enter_context(_service())
        url = f"127.0.0.1:{free_port()}"
        place = ("--front-door", watched.front_door, "--run-dir", str(watched.folder), "--bind", url)
        stack.enter_context(_program("-P", "-m", "prorl_zmq.cli", "prorl", "gateway", *place))
        looking = stack.enter_context(_program(__file__, "view", f"http://{url}/v1/watch"))
        _said(looking)
        return _cost(bare, watched, count, rounds)


def metrics_cost(count: int, rounds: int) -> Cost:
    """Measure with a supervisor that collects metrics, and a scrape of all each second."""
    with ExitStack() as stack:
        bare, watched = stack.enter_context(_service()), _service()
        collecting = stack.enter_context(_program(__file__, "collect", str(watched.folder)))
        _said(collecting)
        return _cost(bare, stack.enter_context(watched), count, rounds)


def traces_cost(count: int, rounds: int) -> tuple[Cost, float]:
    """Measure with a span for each queue and phase of each job; give the share of jobs whose spans arrived, too."""
    with ExitStack() as stack:
        bare, endpoint = stack.enter_context(_service()), stack.enter_context(collector())
        os.environ[ENDPOINT] = endpoint
        stack.callback(os.environ.pop, ENDPOINT)
        cost = _cost(bare, stack.enter_context(_service()), count, rounds)
        time.sleep(EXPORT_S)
        return cost, jobs_traced(endpoint) / (WARM_UP + count * rounds)


def _service() -> BenchService:
    return BenchService([("init", SLOTS), ("run", SLOTS), ("eval", SLOTS)], in_memory=True)


def _cost(bare: BenchService, watched: BenchService, count: int, rounds: int) -> Cost:
    rates: list[tuple[float, float]] = []
    spent = [0.0, 0.0]
    for service in (bare, watched):
        throughput(service.front_door, WARM_UP)
    for number in range(rounds):
        found = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            service = (bare, watched)[side]
            broker = psutil.Process(service.pids()["rollout broker"])
            before = sum(broker.cpu_times()[:2])
            found[side] = throughput(service.front_door, count)
            spent[side] += sum(broker.cpu_times()[:2]) - before
            time.sleep(SETTLE_S)
        rates.append((found[0], found[1]))
    return Cost(
        statistics.median(with_it / without for without, with_it in rates),
        statistics.median(with_it for _, with_it in rates),
        spent[1] / spent[0],
        1e6 * spent[1] / (count * rounds),
    )


@contextmanager
def _program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)


def _said(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


async def _view(url: str) -> None:
    """Look at the dashboard's stream with all viewers, until killed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(seen: asyncio.Event) -> None:
            until = time.monotonic() + START_S
            while True:
                try:
                    async with session.get(url, timeout=aiohttp.ClientTimeout()) as response:
                        response.raise_for_status()
                        async for _ in response.content.iter_any():
                            seen.set()
                except aiohttp.ClientConnectorError:
                    if time.monotonic() > until:
                        raise
                    await asyncio.sleep(0.2)

        seen = [asyncio.Event() for _ in range(VIEWERS)]
        viewers = [asyncio.create_task(one(event)) for event in seen]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in seen)), START_S)
        print("ready", flush=True)
        await asyncio.gather(*viewers)


async def _collect(folder: Path) -> None:
    """Collect a run folder's metrics, as its supervisor does, and read all of them each second, until killed."""
    async with MetricsInbox(folder).open():
        print("ready", flush=True)
        while True:
            await asyncio.sleep(1.0)
            await asyncio.to_thread(_scrape, folder)


def _scrape(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(folder / OUTLET))
        while asking.recv(2**16):
            pass


if __name__ == "__main__":
    what, where = sys.argv[1:]
    if what == "view":
        os.nice(19)  # viewers are elsewhere
        asyncio.run(_view(where))
    else:
        asyncio.run(_collect(Path(where)))
