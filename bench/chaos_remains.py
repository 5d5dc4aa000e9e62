"""The leftovers of a service after its end: processes, mounts, sockets, sandboxes, temporary files."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_zmq.tools.processes.process_tree import children, descendants

if TYPE_CHECKING:
    from chaos_pipeline import Pipeline

PATIENCE_S = 45.0
"""A sandbox outlives a holder that was killed by its lease of 30 s."""


def remains(pipeline: Pipeline) -> list[str]:
    """List what is left of a pipeline that was closed, once it has had its time to go."""
    until = time.monotonic() + PATIENCE_S
    while (left := _left(pipeline)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def reap() -> None:
    """Take the exit codes of processes that were adopted; asyncio waits for its own by pidfd."""
    for pid in children(os.getpid()):
        with suppress(OSError):
            if _state(pid) == "Z":
                os.waitpid(pid, os.WNOHANG)


def _left(pipeline: Pipeline) -> list[str]:
    reap()
    folder = str(pipeline.folder)
    left = [f"process {_words(pid)}" for pid in descendants(os.getpid()) if _state(pid) not in ("Z", "X", "")]
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if folder in line]
    left += [f"mount {place}" for place in mounts if place != str(pipeline.disk)]
    for run_dir in pipeline.run_dirs.values():
        left += [f"socket {path.name}" for path in run_dir.iterdir() if path.is_socket()]
        sandboxes = run_dir / "sandboxes"
        left += [f"sandbox {path.name}" for path in (sandboxes.iterdir() if sandboxes.exists() else ())]
    left += [f"temporary file {path.name}" for path in pipeline.temporary.iterdir()]
    return left


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return str(pid)
