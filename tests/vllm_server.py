"""A real vLLM server over HTTP, for tests: started in the Python that has vLLM, ended with all its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Self

from vllm_python import START_LIMIT_S, environment, vllm_python

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "67108864", "--max-model-len", "4096")
"""Flags that start vLLM on two cores in half a minute."""
SERVER = ("--enable-scale-out", "--enable-prompt-tokens-details", "--no-enable-chunked-prefill")
"""Token ids, their prefix-cache hits, and no end of the server by a seeded request (see `vllm_start`)."""
ON_CPU = {
    "VLLM_SERVER_DEV_MODE": "1",  # weight updates
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),  # engines that start by themselves take the first
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def free_port() -> int:
    """Give a TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """Runs for as long as its context; `wait_ready` before it is used.

    Args:
        model: the model's folder.
        folder: for its log.
        flags: vLLM's, beside `SMALL`.
        cores: that it runs on; None: all.
    """

    def __init__(self, model: Path, folder: Path, *flags: str, cores: set[int] | None = None) -> None:
        self._log = folder / "vllm-server.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        where = ("--host", "127.0.0.1", "--port", str(port), "--model", str(model))
        command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", *where, *SERVER, *SMALL, *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**environment(folder), **ON_CPU},
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
            )

    def wait_ready(self) -> None:
        """Wait until it serves."""
        until = time.monotonic() + START_LIMIT_S
        while True:
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < until, self._log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Its engine runs in a process of its own, which would outlive it.
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
