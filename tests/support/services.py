"""Programs of ours that serve, as processes of a test, and the whole service that the tests of a worker share.

The fixture `served` is that one service. A test that uses it stops nothing, leaves the backends as they were, and has a
session, a client and a batch of its own. Who kills or configures a service starts an own one: `with serving(…)`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from command_lines import line_of

from prorl_zmq import AsyncRolloutClient, Job, RolloutClient, Sampling
from prorl_zmq.wire.messages.backends import ListBackends
from prorl_zmq.wire.messages.base import new_id

from . import forks
from .commands import prorl
from .ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

START_S = 90.0
END_S = 60.0
LOOK_S = 0.5
PROCESS = '[sandbox]\nkind = "process"\n'


class Program:
    """One of our programs in a process of its own, and what it prints, line by line."""

    def __init__(
        self,
        program: str,
        *arguments: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        interpreter: bool = False,
    ) -> None:
        """Start it.

        Args:
            program: `prorl`, `prorl-stage` or `prorl-engine`.
            arguments: as in a shell.
            cwd: its working folder; None: the test's.
            environment: all of its variables; None: the test's.
            interpreter: start an interpreter, which also reads PYTHONPATH as it starts, instead of a fork.
        """
        self.lines: list[str] = []
        options: dict[str, Any] = {"cwd": cwd, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        words = ("-m", "prorl_zmq.cli", program, *map(str, arguments))
        self.process: subprocess.Popen[str] = (
            subprocess.Popen([sys.executable, "-P", *words], **options)
            if interpreter
            else forks.start(*words, **options)
        )
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def log(self) -> str:
        """All that it has printed."""
        return "".join(self.lines)

    def wait_line(self, text: str, wait_s: float = START_S) -> str:
        """Wait until it prints a line with a text; return the line."""
        deadline = time.monotonic() + wait_s
        with self._news:
            while not (found := [line for line in self.lines if text in line]):
                ended = not self._reader.is_alive() or self.process.poll() is not None
                assert time.monotonic() < deadline, f"waited {wait_s:g} s for {text!r}:\n{self.log}"
                self._news.wait(LOOK_S)
                assert not ended or text in self.log, f"it ended without {text!r}:\n{self.log}"
        return found[0]

    def wait(self, wait_s: float = END_S) -> int:
        """Wait until it ends; return its exit code."""
        try:
            code = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {wait_s:g} s:\n{self.log}") from None
        self._reader.join(wait_s)
        return code

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal, if it has not ended; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def close(self) -> None:
        """End it, by force if need be."""
        try:
            self.end()
        except AssertionError:
            self.end(signal.SIGKILL)
            raise

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, words: str) -> int:
        """Return the pid of the one process below it whose command line has these words."""
        (found,) = [one.pid for one in self.children() if words in line_of(one)]
        return found

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in iter(self.process.stdout.readline, ""):
                with self._news:
                    self.lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()


@contextmanager
def started(
    program: str,
    *arguments: object,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    interpreter: bool = False,
) -> Iterator[Program]:
    """Run a program while the context does."""
    running = Program(program, *arguments, cwd=cwd, environment=environment, interpreter=interpreter)
    try:
        yield running
    finally:
        running.close()


class Service(Program):
    """`prorl serve` in a folder of its own, whose sandboxes are plain processes."""

    def __init__(
        self, folder: Path, topology: str = PROCESS, *flags: object, interpreter: bool = False, **variables: str
    ) -> None:
        self.folder = folder
        self.config = folder / "topology.toml"
        self.config.write_text(topology)
        self.run_dir = folder / "run"
        self.front_door = f"ipc://{self.run_dir}/front_door"
        self.environment = {**os.environ, "PRORL_RUN_DIR": str(self.run_dir)}
        """In which commands find it."""
        environment = {**os.environ, **variables}
        super().__init__("prorl", "serve", *self.flags(), *flags, environment=environment, interpreter=interpreter)

    def flags(self) -> list[str]:
        return ["--config", str(self.config), "--run-dir", str(self.run_dir)]

    def wait_ready(self, wait_s: float = START_S) -> None:
        self.wait_line("prorl serve: ready at", wait_s)

    def client(self, session: str | None = None) -> RolloutClient:
        return RolloutClient(self.front_door, session=session, timeout_s=START_S)

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a command of `prorl` that asks this service, in its folder."""
        return prorl(*arguments, "--connect", self.front_door, cwd=self.folder)


@contextmanager
def serving(
    topology: str = PROCESS,
    *flags: object,
    interpreter: bool = False,
    start_s: float = START_S,
    **variables: str,
) -> Iterator[Service]:
    """Start a service of the test's own, whose engines may take `start_s`, and end it."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = Service(Path(folder), topology, *flags, interpreter=interpreter, **variables)
        try:
            service.wait_ready(start_s)
            yield service
        finally:
            service.close()


class SharedService(Service):
    """The one of all tests of a worker: with a gateway, which uses its engine, and a dashboard, which has a key."""

    def __init__(self, folder: Path) -> None:
        gateway = f"127.0.0.1:{free_port()}"
        self.url = f"http://{gateway}"
        """The gateway's."""
        self.runs = folder / "runs"
        """Runs of `prorl eval` that the dashboard compares."""
        self.runs.mkdir()
        bound = f'[gateway]\nbind = "{gateway}"\nuse_llm_servers = false\n'
        shown = f'[dashboard]\nbind = "127.0.0.1:{free_port()}"\nruns = "{self.runs}"\n'
        super().__init__(folder, PROCESS + bound + shown)

    def wait_ready(self, wait_s: float = START_S) -> None:
        super().wait_ready(wait_s)
        job = Job(task="math", instance={"problem": "1", "ground_truth": "1"}, sampling=Sampling(max_tokens=4))
        with self.client() as client:
            client.submit(job)
            assert [trajectory.outcome for trajectory in client.stream()] == ["completed"], self.log

    @property
    def dashboard(self) -> str:
        """The dashboard's address, with its key."""
        self.wait_line("open http")
        return str(re.findall(r"open (http\S+)", self.log)[-1])

    @contextmanager
    def gateway(self, *flags: str, port: int = 0, **variables: str) -> Iterator[tuple[Program, str]]:
        """Start a further gateway; yield it and its URL."""
        bind = f"127.0.0.1:{port or free_port()}"
        with started("prorl", "gateway", "--bind", bind, *flags, environment={**self.environment, **variables}) as one:
            yield one, f"http{'s' if '--tls-cert' in flags else ''}://{bind}"

    @asynccontextmanager
    async def without_engine(self) -> AsyncIterator[AsyncRolloutClient]:
        """Jobs wait while this is open: no backend takes any."""
        async with AsyncRolloutClient(self.front_door) as client:
            (status,) = [one for one in await client.backends.list() if one.backend.backend_id == "engine-0"]
            await client.backends.drain("engine-0")
            try:
                yield client
            finally:
                await client.backends.add(status.backend)

    @staticmethod
    async def waiting(client: AsyncRolloutClient) -> int:
        """Return how many jobs wait for a backend."""
        listed: Any = await client.backends.ask(ListBackends(new_id()))
        return int(listed.waiting)
