"""Counts what empty jobs take of a service in this process, for test_job_cost: `python counted_jobs.py JOBS`.

Brokers run in threads over a journal on disk, a stage process of each role on the main thread's loop, with the client.
The jobs pass one after the other, so that each count is the same in every run: nothing depends on how many messages a
slow process finds together. Nothing periodic runs. Prints the counts of all jobs as JSON. Before and behind the jobs
`os.stat` looks at MARK, by which a log of system calls can be cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import zmq

import prorl_zmq
from prorl_zmq import AsyncRolloutClient, Job
from prorl_zmq.brokers.backends.backend_broker import BackendBroker
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.rollout.rollout_broker import RolloutBroker
from prorl_zmq.config import RolloutBrokerSettings, ServiceSettings, Topology
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, PhaseData, RunPhase
from prorl_zmq.stages.stage_process import StageOptions, StageProcess
from prorl_zmq.system.run_folder import own_run_dir
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import FrameType

MARK = "/counted-jobs"
WARM_UP = 5
WAIT_S = 60.0
OURS = str(Path(prorl_zmq.__file__).parent)
SETTINGS = RolloutBrokerSettings(heartbeat_s=60.0, lease_s=600.0)


class Nothing(msgspec.Struct, frozen=True):
    pass


class NothingHandler(AgentHandler[Nothing]):
    task = "nothing"
    instance_type = Nothing

    async def run(self, phase: RunPhase[Nothing]) -> PhaseData:
        return {}

    async def eval(self, phase: EvalPhase[Nothing]) -> Evaluation:
        return Evaluation(1.0)


class Counts:
    """What was counted while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.of: Counter[str] = Counter()

    def socket_class(self) -> type[zmq.Socket[bytes]]:
        """Return a class of sockets whose messages are counted as they are sent."""
        counts = self

        class CountedSocket(zmq.Socket):  # type: ignore[type-arg]
            def send(self, data: Any, flags: int = 0, copy: bool = True, **options: Any) -> Any:
                if counts.on:
                    frame = memoryview(getattr(data, "buffer", data))
                    counts.of["frames"] += 1
                    counts.of["messages"] += not flags & zmq.SNDMORE
                    counts.of["wire bytes"] += frame.nbytes
                return super().send(data, flags, copy, **options)

        return CountedSocket

    def profile(self, name: str) -> Callable[[FrameType, str, Any], None]:
        """Return a profile function that counts the calls of this project's functions, as `name`."""
        ours: dict[Any, bool] = {}

        def count(frame: FrameType, event: str, _: Any) -> None:
            if self.on and event == "call":
                code = frame.f_code
                is_ours = ours.get(code)
                if is_ours is None:
                    is_ours = ours[code] = code.co_filename.startswith(OURS)
                self.of[name] += is_ours

        return count


class Brokers:
    """Both brokers in threads, with a journal on disk."""

    def __init__(self, folder: Path, counts: Counts) -> None:
        self.topology = Topology(service=ServiceSettings(run_dir=str(folder)), rollout_broker=SETTINGS)
        self._path = folder / "rollout.journal"
        self.journal = Journal(self._path)
        self._brokers = [RolloutBroker(self.topology, self.journal), BackendBroker(self.topology, None)]
        self._threads = [threading.Thread(target=self._run, args=(one, counts)) for one in self._brokers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for broker in self._brokers:
            broker.stop()
        for thread in self._threads:
            thread.join()
        self.journal.close()

    def written(self) -> Counter[str]:
        """Return what has been written to the journal since it was opened; nothing is ever copied into the file."""
        connection: Any = self.journal._file.connection
        log = self._path.with_name(f"{self._path.name}-wal")
        return Counter({"journal rows": connection.total_changes, "journal bytes": log.stat().st_size})

    @staticmethod
    def _run(broker: RolloutBroker | BackendBroker, counts: Counts) -> None:
        sys.setprofile(counts.profile("calls of functions in the brokers"))
        broker.run()


@contextlib.asynccontextmanager
async def stage_processes(brokers: Brokers, folder: Path) -> AsyncIterator[None]:
    """Run one for each role."""
    connect = brokers.topology.endpoint(SETTINGS.stage_events)
    options = [
        StageOptions(role=role, slots=4, connect=connect, node="local", run_dir=folder, sandbox="process")
        for role in Phase
    ]
    processes = [StageProcess(one, {"nothing": NothingHandler()}) for one in options]
    async with asyncio.TaskGroup() as group:
        for process in processes:
            group.create_task(process.run())
        try:
            yield
        finally:
            for process in processes:
                process.stop()


@contextlib.contextmanager
def counting(counts: Counts, brokers: Brokers) -> Iterator[None]:
    before = brokers.written()
    _mark()
    counts.on = True
    sys.setprofile(counts.profile("calls of functions in stage processes and the client"))
    yield
    sys.setprofile(None)
    counts.on = False
    _mark()
    counts.of += brokers.written() - before


async def count(jobs: int, folder: Path, counts: Counts) -> None:
    with Brokers(folder, counts) as brokers:
        front_door = brokers.topology.endpoint(SETTINGS.front_door)
        async with stage_processes(brokers, folder), AsyncRolloutClient(front_door) as client:
            async with asyncio.timeout(WAIT_S):
                while True:
                    if len((await client.status()).stages) == len(Phase):
                        break
                    await asyncio.sleep(0.01)
            await _pass(client, WARM_UP)
            with counting(counts, brokers):
                await _pass(client, jobs)


async def _pass(client: AsyncRolloutClient, jobs: int) -> None:
    for _ in range(jobs):
        await client.submit(Job(task="nothing", instance={}))
        (done,) = await client.collect(1)
        if done.reward != 1.0:
            raise RuntimeError(f"a job ended as {done.outcome}: {done.result.error}")


def _mark() -> None:
    with contextlib.suppress(FileNotFoundError):
        os.stat(MARK)  # noqa: PTH116 - it is the call itself that counts


def main() -> None:
    counts = Counts()
    zmq.Context._socket_class = counts.socket_class()
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        asyncio.run(count(int(sys.argv[1]), own_run_dir(Path(folder)), counts))
    print(json.dumps(counts.of))


if __name__ == "__main__":
    main()
