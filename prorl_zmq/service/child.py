"""Runs a service, or a module of this package, as a child of another program.

The context ends the child and removes its run folder; the kernel kills it if the program is killed. The child leads its
own session, so Ctrl-C in a terminal reaches only the program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from ..errors import ConfigError, RequestTimeout
from ..system.processes import ISOLATED, begin_session
from ..wire.messages.backends import ListBackends
from ..wire.messages.base import new_id
from .engine_starts import no_engine_left

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..client.blocking.client import RolloutClient
    from ..wire.messages.backends import BackendList

START_S = 60.0
"""How long the service may take until all its processes have reported."""
STOP_S = 30.0
RUN_DIR_PREFIX = "prorl-child-"
"""Prefix of a child service's temporary run folder."""


class ChildProcess:
    """A Python module that runs as a child while the context is open."""

    def __init__(self, arguments: Sequence[str], log: Path, nice: int = 0) -> None:
        self._arguments = arguments
        self.log = log
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """0 before it has started."""
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *ISOLATED, "-m", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(begin_session, os.getpid(), self._nice),  # noqa: PLW1509 - before the program has threads
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class ChildService(ChildProcess):
    """A service in its own run folder; `pid` is the supervisor's, the ancestor of all its processes."""

    def __init__(self, folder: Path, topology: str, nice: int = 0) -> None:
        file = folder / "topology.toml"
        file.write_text(topology, encoding="utf-8")
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        # The system's temporary folder keeps socket paths short.
        self._run_dir = tempfile.TemporaryDirectory(prefix=RUN_DIR_PREFIX)
        options = ["--config", str(file), "--run-dir", self.run_dir, "--log-dir", str(logs)]
        super().__init__(["prorl_zmq.cli", "prorl", "serve", *options], logs / "serve.log", nice)

    @property
    def run_dir(self) -> str:
        return self._run_dir.name

    @property
    def front_door(self) -> str:
        return f"ipc://{self.run_dir}/front_door"

    @property
    def logs(self) -> Path:
        return self.log.parent

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self._run_dir.cleanup()

    def wait_ready(self, client: RolloutClient) -> None:
        """Wait until each stage and an engine have reported."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if not self.is_running:
                raise ConfigError(f"the service ended as it started; {self.log} says why")
            with suppress(RequestTimeout):
                roles = {str(stage.role) for stage in client.status(timeout_s=1.0).stages}
                listed: BackendList = client.backends.ask(ListBackends(new_id()), 1.0)
                if problem := no_engine_left(listed):
                    raise ConfigError(f"the service's engine cannot be started: {problem}")
                if roles >= {"init", "run", "eval"} and listed.backends:
                    return
                client.collect(1, wait_s=0.2)
        raise RequestTimeout(
            f"the service was not ready within {START_S:g} s; see {self.logs}/*.log", timeout_s=START_S
        )
