"""swe-mini through whole services with real Apptainer sandboxes, by agents with known answers (patch_engine.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import psutil

from prorl_zmq import EpisodeLimits, Job, PhaseLimits, RolloutClient
from prorl_zmq.service.child import ChildService
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.tasks.loading import load_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq import Trajectory

SLOTS = 8
"""Per stage."""
SAMPLE_S = 0.5
"""How often processor time is read: an execution server's last half second is missed, of some ten."""
WAIT_S = 1800.0
TOPOLOGY = """\
backends = []

[rollout_broker]
ready_limit = {slots}

[sandbox]
kind = "apptainer"
image_folders = {image_folders}

[[stage]]
role = "init"
slots = {slots}

[[stage]]
role = "run"
slots = {slots}

[[stage]]
role = "eval"
slots = {slots}
"""


class Run(NamedTuple):
    """What came of all instances under one policy."""

    trajectories: list[Trajectory]
    wall_s: float
    ours_s: float
    """Processor time of the service's own processes."""
    all_s: float
    """Processor time of the whole machine."""

    def resolved(self) -> dict[str, float | None]:
        """Give the reward by rollout."""
        return {one.job_id.rpartition("-")[0]: one.reward for one in self.trajectories}


class PatchService:
    """A service with one patching engine, for as long as its context.

    Args:
        data: the swe data file.
        policy: of the engine.
        turn_s: its median turn.
        images: a folder of images in addition to the usual one.
    """

    def __init__(self, data: Path, policy: str, turn_s: float, images: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="prorl-bench-")
        folders = json.dumps([str(images)] if images is not None else [])
        self._service = ChildService(Path(self._folder.name), TOPOLOGY.format(slots=SLOTS, image_folders=folders))
        self._engine_words = (str(data), policy, str(turn_s))
        self._engine: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._service.__enter__()
        run_dir = self._service.run_dir
        script = str(Path(__file__).with_name("patch_engine.py"))
        places = (f"ipc://{run_dir}/backend_broker", f"ipc://{self._folder.name}/engine")
        self._engine = subprocess.Popen(
            [sys.executable, script, *places, *self._engine_words],
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads of ours yet
        )
        with RolloutClient(self._service.front_door, timeout_s=60) as client:
            self._service.wait_ready(client)
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.terminate()
            self._engine.wait(20)
        self._service.__exit__()
        self._folder.cleanup()

    def run(self, data: Path, in_flight: int, times: int = 1) -> Run:
        """Run all instances, several times if asked, at most so many at a time."""
        jobs = [_limited(job, number) for number in range(times) for job in load_jobs(data)]
        done: list[Trajectory] = []
        with (
            RolloutClient(self._service.front_door, timeout_s=60) as client,
            _Clock(psutil.Process(self._service.pid)) as clock,
        ):
            waiting = iter(jobs)
            client.submit(islice(waiting, in_flight))
            for trajectory in client.stream(timeout_s=WAIT_S):
                done.append(trajectory)
                client.submit(islice(waiting, 1))
        return Run(done, clock.wall_s, clock.ours_s, clock.all_s)


class _Clock(threading.Thread):
    """Measures wall time, and processor time of the service's own processes and of the machine.

    Args:
        service: the process that all others of the service are below.
    """

    def __init__(self, service: psutil.Process) -> None:
        super().__init__()
        self.wall_s = self.all_s = self.ours_s = 0.0
        self._service = service
        self._used: dict[tuple[int, float], float] = {}
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._sample()
        self._before = sum(self._used.values())
        self._busy, self._since = _busy_s(), time.monotonic()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.all_s = time.monotonic() - self._since, _busy_s() - self._busy
        self._over.set()
        self.join()
        self._sample()
        self.ours_s = sum(self._used.values()) - self._before

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        with suppress(psutil.Error):
            for process in self._service.children(recursive=True):
                with suppress(psutil.Error):
                    if any("prorl_zmq" in word for word in process.cmdline()):
                        times = process.cpu_times()
                        self._used[process.pid, process.create_time()] = times.user + times.system


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.steal)


def _limited(job: Job, number: int) -> Job:
    """Give the job of an instance's rollout of that number; what its id begins with is the same in each run."""
    return Job(
        task=job.task,
        instance=job.instance,
        job_id=f"{job.instance['instance_id']}"[-50:].lstrip("._-") + f"-{number}-{os.urandom(3).hex()}",
        episode=EpisodeLimits(max_tokens=1_000_000),
        limits=PhaseLimits(eval_s=900),
        max_attempts=1,
    )


def rows_of(data: Path) -> Sequence[dict[str, Any]]:
    """Give the rows of a data file."""
    return [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
