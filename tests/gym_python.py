"""A Python with NeMo Gym, which wants a newer one than this: where it is, and Gym's servers while a test runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import vllm_python
from framework_python import framework_python

if TYPE_CHECKING:
    from collections.abc import Sequence

START_LIMIT_S = 180.0
"""Longest start of Gym's servers, Ray among them, on a machine that may be busy."""
STOP_LIMIT_S = 60.0
READY = "servers ready!"


def gym_python() -> Path:
    """Give the interpreter, or skip the test."""
    return Path(framework_python("gym"))


def environment(folder: Path, run_dir: Path) -> dict[str, str]:
    """Give an environment as a user's who activated that interpreter's venv, with the package under test in it."""
    programs = gym_python().parent
    return {
        **vllm_python.environment(folder),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(programs.parent),
        "PRORL_RUN_DIR": str(run_dir),
    }


class GymServers:
    """Gym's servers, started by a command in a folder; its `env.yaml` keeps their ports apart from others'."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self._command, self._folder, self._environment = command, folder, environment
        self.lines: list[str] = []
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (self._folder / "env.yaml").write_text(f"head_server: {{host: 127.0.0.1, port: {port}}}\n")
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {self._command}"],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._ready.wait(START_LIMIT_S) or self._process.poll() is not None:
            self.__exit__()
            raise AssertionError("".join(self.lines))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        with suppress(ProcessLookupError):  # what Gym has not ended of its session
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(STOP_LIMIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line)
                if READY in line:
                    self._ready.set()
        self._ready.set()


def run(command: str | Sequence[str], folder: Path, environment: dict[str, str], limit_s: float = 120.0) -> str:
    """Run a command of a shell, or a program; give what it printed."""
    words = ["bash", "-c", command] if isinstance(command, str) else command
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
