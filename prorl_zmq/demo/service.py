"""The demo's own service: `prorl serve` as a child process, in a run folder of its own."""

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
from ..processes import ISOLATED, die_with_parent

if TYPE_CHECKING:
    from pathlib import Path

    from ..client import RolloutClient

START_S = 60.0
"""How long the service may take until all its processes have reported."""
STOP_S = 30.0
TOPOLOGY = """\
[rollout_broker]
ready_limit = 16

[sandbox]
kind = "{sandbox}"

[[stage]]
role = "init"
slots = 4

[[stage]]
role = "run"
slots = 16

[[stage]]
role = "eval"
slots = 4

[[backends]]
kind = "embedded"
model = "{model}"
"""


class DemoService:
    """Starts a service for the demo, and ends it with the context.

    Args:
        out: the demo's folder: the topology file and the logs go there.
        model: the engine's first weights.
        sandbox: `bubblewrap` or `process`.
    """

    def __init__(self, out: Path, model: Path, sandbox: str) -> None:
        self._topology = out / "topology.toml"
        self._topology.write_text(TOPOLOGY.format(sandbox=sandbox, model=model.absolute()), encoding="utf-8")
        self._logs = out / "logs"
        self._logs.mkdir(exist_ok=True)
        # Sockets have short paths only in the system's own temporary folder.
        self._run_dir = tempfile.TemporaryDirectory(prefix="prorl-demo-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def front_door(self) -> str:
        """The service's endpoint."""
        return f"ipc://{self._run_dir.name}/front_door"

    def __enter__(self) -> Self:
        with (self._logs / "serve.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *ISOLATED, "-m", "prorl_zmq.cli", "prorl", "serve"),
                    *("--config", str(self._topology), "--run-dir", self._run_dir.name, "--log-dir", str(self._logs)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - the command has no other thread
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
        self._run_dir.cleanup()

    def wait_ready(self, client: RolloutClient) -> None:
        """Wait until each stage and the engine have reported.

        Raises:
            ConfigError: the service ended.
            RequestTimeout: it was not ready in time.
        """
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                raise ConfigError(f"the service ended as it started; {self._logs}/serve.log says why")
            with suppress(RequestTimeout):
                roles = {str(stage.role) for stage in client.status(timeout_s=1.0).stages}
                if roles == {"init", "run", "eval"} and client.backends.list(timeout_s=1.0):
                    return
                client.collect(1, wait_s=0.2)
        raise RequestTimeout(
            f"the service was not ready within {START_S:g} s; see {self._logs}/*.log", timeout_s=START_S
        )
