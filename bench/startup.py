"""The cost of starting: the client's import, a command, a service with all its processes, and one stage process.

The CPU of a service is that of all its processes, including ended ones, until `prorl serve` reports that it is ready.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from harness import Row, main

from prorl_zmq.config import SandboxSettings, ServiceSettings, Topology
from prorl_zmq.service.preloading import SHARED, STAGE
from prorl_zmq.service.process_plans import StagePlan, pinned
from prorl_zmq.system.fork_server import ForkServer
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMPORT_TARGET_MS = 150.0
COMMAND_TARGET_MS = 150.0
READY_TARGET_S = 1.0
READY_CPU_TARGET_S = 1.2
LIMIT_S = 120.0
CODE = """
import time
started = time.perf_counter()
import numpy, zmq
between = time.perf_counter()
import prorl_zmq
from prorl_zmq import Job, RolloutClient
print(between - started, time.perf_counter() - between)
"""
PROGRAM = (sys.executable, "-P", "-m", "prorl_zmq.cli")


def measure(quick: bool) -> list[Row]:
    runs = []
    for _ in range(5 if quick else 30):
        done = subprocess.run([sys.executable, "-P", "-c", CODE], capture_output=True, text=True, check=True)
        runs.append([1e3 * float(part) for part in done.stdout.split()])
    before, ours = (statistics.median(column) for column in zip(*runs, strict=True))
    rows = [
        Row("import numpy and zmq", before, "ms"),
        _at_most("import prorl_zmq on top", ours, "ms", IMPORT_TARGET_MS, "numpy and zmq", before),
    ]
    times = 3 if quick else 15
    bare = _median(lambda: _first_output((sys.executable, "-P", "-c", "print()")), times)
    rows.append(Row("an interpreter's first output", 1e3 * bare, "ms"))
    shown = _median(lambda: _first_output((*PROGRAM, "prorl", "--help")), times)
    rows.append(_beyond("prorl --help", shown, bare))
    with tempfile.TemporaryDirectory(prefix="prorl-b-") as name, _serving(Path(name) / "run") as (_, _):
        command = (*PROGRAM, "prorl", "status", "--connect", f"ipc://{name}/run/front_door")
        rows.append(_beyond("prorl status", _median(lambda: _first_output(command), times), bare))
    ready, cpu = zip(*(_ready() for _ in range(2 if quick else 7)), strict=True)
    rows += [
        _at_most("a service is ready", statistics.median(ready), "s", READY_TARGET_S),
        _at_most("CPU of its processes until then", statistics.median(cpu), "s", READY_CPU_TARGET_S),
    ]
    return rows + _stage_rows(times)


def _at_most(name: str, value: float, unit: str, target: float, against: str = "", other: float = 0.0) -> Row:
    ratio = value / other if against else None
    return Row(name, value, unit, against, ratio, f"at most {target:g} {unit}", value <= target)


def _beyond(command: str, seconds: float, bare: float) -> Row:
    what = f"{command}: first output, beyond an interpreter's"
    return _at_most(what, 1e3 * (seconds - bare), "ms", COMMAND_TARGET_MS, "an interpreter", 1e3 * bare)


def _median(once: Callable[[], float], times: int) -> float:
    return statistics.median(once() for _ in range(times))


def _first_output(command: tuple[str, ...]) -> float:
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        took = time.perf_counter() - started
        process.stdout.read()
    return took


@contextmanager
def _serving(run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """Start a service of the default topology; yield it and how long it took."""
    started = time.perf_counter()
    command = [*PROGRAM, "prorl", "serve", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        line = next(line for line in service.stderr if "ready at" in line)
        assert line
        yield service, time.perf_counter() - started
        service.send_signal(signal.SIGTERM)
        service.communicate(timeout=LIMIT_S)


def _ready() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="prorl-b-") as name, _serving(Path(name) / "run") as (service, took):
        whole = psutil.Process(service.pid)
        times = [process.cpu_times() for process in (whole, *whole.children(recursive=True))]
        return took, sum(sum(each[:4]) for each in times)


def _stage_rows(times: int) -> list[Row]:
    """Start a stage process until it says that it is there, as a fork and as an interpreter."""
    with tempfile.TemporaryDirectory(prefix="prorl-b-") as name, ForkServer((*SHARED, *STAGE)) as server:
        server.preload()
        topology = pinned(Topology(ServiceSettings(run_dir=name), sandbox=SandboxSettings("process")))
        plan = StagePlan(name="init-0", topology=topology, role=Phase.INIT, connect=f"ipc://{name}/stage_events")
        plan.write()
        program = (sys.executable, "-P", *plan.arguments)
        started = _median(lambda: _start(lambda error: subprocess.Popen(program, stderr=error)), times)
        forked = _median(lambda: _start(lambda error: server.start(plan.arguments, stderr=error)), times)
    return [
        Row("a stage process, as an interpreter", 1e3 * started, "ms"),
        Row("a stage process, as a fork", 1e3 * forked, "ms", "an interpreter", forked / started),
    ]


def _start(start: Callable[[int], subprocess.Popen[bytes]]) -> float:
    read, write = os.pipe()
    began = time.perf_counter()
    process = start(write)
    os.close(write)
    os.read(read, 1)
    took = time.perf_counter() - began
    process.kill()
    process.wait()
    os.close(read)
    return took


if __name__ == "__main__":
    main("startup", "what starting costs: the client's import, commands, a service, a stage process", measure)
