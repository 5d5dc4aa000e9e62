"""Real vLLM engines for benchmarks: the location of vLLM, a tiny model, and processes that end with the benchmark.

vLLM has its own Python (`make vllm`, or PRORL_VLLM_PYTHON). Its processes import the same package as the benchmark, and
nothing else of the benchmark's environment. A process is ready when it has printed its ready line; it ends, with its
descendants, when the `Engines` context exits.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple, Self

from service import free_port

import prorl_zmq
from prorl_zmq.examples.trainers.shared import make_model
from prorl_zmq.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parent.parent
START_S = 240.0
"""Longest start of an engine."""
LISTEN_S = 10.0
END_S = 20.0
"""How long one may take to end before it is killed."""
FLAGS = ("--dtype=float32", "--enforce-eager")
"""vLLM's, for all engines here."""
QUIET = ("--disable-log-stats", "--disable-uvicorn-access-log")
"""What the server over HTTP would do in addition to its work."""
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""What our engine host sets by itself."""
WITHOUT = "no vLLM: `make vllm` installs it, or PRORL_VLLM_PYTHON names a Python that has it"


def vllm_python() -> str | None:
    """Give the interpreter that has vLLM, if there is one."""
    named = os.environ.get("PRORL_VLLM_PYTHON", "")
    beside = REPOSITORY / ".vllm" / "bin" / "python"
    return named or (str(beside) if beside.is_file() else None)


class _Process(NamedTuple):
    name: str
    popen: subprocess.Popen[bytes]
    ready: Event
    """Set when it said so, and when its output ended."""
    said: list[str]
    """The line that said so; empty: it ended before."""
    log: Path


class Engines:
    """Runs engines for as long as its context.

    Args:
        python: the interpreter that has vLLM.
    """

    def __init__(self, python: str) -> None:
        self._python = python
        self._folder = tempfile.TemporaryDirectory(prefix="prorl-bench-")
        self.folder = Path(self._folder.name)
        """For sockets."""
        self._processes: list[_Process] = []
        self._ports: list[int] = []
        self._environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(self._packages())}
        self.model = self.folder / "model"
        """The tiny model's folder."""

    def __enter__(self) -> Self:
        command = [self._python, make_model.__file__, "--raw", str(self.model)]
        try:
            subprocess.run(command, env=self._environment, capture_output=True, timeout=START_S, check=True)
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def output(self, *command: str, timeout_s: float) -> str:
        """Run the interpreter to its end, and give what it printed."""
        done = subprocess.run(
            [self._python, *command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def host(self, name: str, *flags: str, cores: Sequence[int]) -> str:
        """Start `prorl-engine --engine vllm` on these cores, and give its endpoint; see `wait`."""
        endpoint = f"ipc://{self.folder}/{name}"
        # No broker answers at that endpoint: a bench chooses the backend itself.
        where = ("--connect", f"ipc://{self.folder}/nobody", "--bind", endpoint, "--name", name)
        what = ("--engine", "vllm", "--model", str(self.model), "--cores", ",".join(map(str, cores)))
        command = ("-P", "-m", "prorl_zmq.cli", "prorl-engine", *what, *where, "--run-dir", str(self.folder))
        self.start(name, f"engine {name} serves at", *command, "--", *FLAGS, *flags)
        return endpoint

    def server(self, name: str, *flags: str, core: int) -> str:
        """Start vLLM's own server, computing on one core, and give its URL; see `wait`."""
        port = free_port()
        where = ("--host=127.0.0.1", f"--port={port}", f"--model={self.model}", "--enable-scale-out", *QUIET)
        command = ("-P", "-m", "vllm.entrypoints.openai.api_server", *where, *FLAGS, *flags)
        self.start(name, "Application startup complete.", *command, core=core)
        self._ports.append(port)
        return f"http://127.0.0.1:{port}"

    def start(self, name: str, ready: str, *arguments: str, core: int | None = None) -> None:
        """Start vLLM's Python.

        Args:
            name: of the process, for its log.
            ready: part of the line with which it says that it is ready.
            arguments: the interpreter's.
            core: that vLLM computes on; None: it or the process itself decides.
        """
        binding = {} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
        process = subprocess.Popen(
            [self._python, *arguments],
            env={**self._environment, **binding},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no thread of ours holds a lock
        )
        started = _Process(name, process, Event(), [], self.folder / f"{name}.log")
        self._processes.append(started)
        Thread(target=_pump, args=(started, ready), name=f"log of {name}", daemon=True).start()

    def wait(self) -> None:
        """Wait until all that was started is ready.

        Raises:
            RuntimeError: one is not.
        """
        for process in self._processes:
            if not process.ready.wait(START_S) or not process.said:
                last = process.log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"{process.name} did not start:\n{last}")
        for port in self._ports:
            _await_listener(port)

    def pid(self, name: str) -> int:
        """Give the process of this name."""
        return next(process.popen.pid for process in self._processes if process.name == name)

    def stop(self) -> None:
        """End all that was started."""
        for process in self._processes:
            process.popen.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)  # vLLM's processes can outlive the one that started them
            process.popen.wait()
        self._processes.clear()
        self._ports.clear()

    def _packages(self) -> Path:
        """Give a folder for PYTHONPATH with the package alone, and the entry point that vLLM calls in its processes."""
        place = self.folder / "packages"
        place.mkdir()
        (place / "prorl_zmq").symlink_to(Path(prorl_zmq.__file__).parent)
        installed = importlib.metadata.files("prorl_zmq") or ()
        described = Path(str(next(file for file in installed if file.name == "entry_points.txt").locate())).parent
        (place / described.name).symlink_to(described)
        return place


def _await_listener(port: int) -> None:
    """Wait until a server accepts connections, which is some milliseconds after it said that it has started."""
    until = time.monotonic() + LISTEN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), LISTEN_S).close()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return


def _pump(process: _Process, ready: str) -> None:
    assert process.popen.stdout is not None
    with process.popen.stdout as output, process.log.open("wb") as log:
        for line in output:
            log.write(line)
            log.flush()
            if ready.encode() in line:
                process.said.append(line.decode(errors="replace"))
                process.ready.set()
    process.ready.set()
