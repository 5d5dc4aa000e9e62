"""A real vLLM server over HTTP, for tests: started in the Python that has vLLM, ended with all its processes.

Its model calls bash (`caller_model.py`), so that conversations with it have several turns.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Self

from support.ports import free_port
from vllm_python import HERE, START_LIMIT_S, environment, tiny_models, vllm_python

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


class VllmServer:
    """Runs for as long as its context; it serves when that begins.

    Args:
        folder: for its log and models.
        flags: more of vLLM's.
        variables: more of its environment.
    """

    def __init__(self, folder: Path, *flags: str, **variables: str) -> None:
        self.folder = folder
        self.models = [folder / "caller-0", folder / "caller-1"]
        """What it serves at first, and one that differs from it."""
        self._log = folder / "vllm-server.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._run("caller_model.py", str(tiny_models(folder, 1)[0]), *map(str, self.models))
        where = ("--host", "127.0.0.1", "--port", str(port), "--model", str(self.models[0]))
        command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", *where, *SERVER, *SMALL, *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**environment(folder), **ON_CPU, **variables},
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def generated_tokens(self) -> int:
        """Give how many it has generated since it was started."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:generation_tokens_total"))

    def _run(self, script: str, *arguments: str) -> None:
        command = [vllm_python(), str(HERE / script), *arguments]
        done = subprocess.run(
            command, env=environment(self.folder), capture_output=True, text=True, timeout=START_LIMIT_S
        )
        assert done.returncode == 0, done.stderr

    def _wait_ready(self) -> None:
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
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
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
