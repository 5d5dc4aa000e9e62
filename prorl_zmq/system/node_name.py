"""Default names of nodes and run folders, distinct between machines and between allocations.

All processes of one run folder get the same name: the phases of a job share a sandbox's folder in it. `place_of`
identifies machine and folder, so that a broker can refuse a second node of the same name.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
HOST_LENGTH, FOLDER_LENGTH = 40, 60
"""Most characters of a host's name in a node's name, and of a folder's in a place."""


def allocation() -> str:
    """Return the name of this process's allocation by a scheduler; empty: none."""
    job, task = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID", "")
    slurm = f"{job}_{task}" if job and task else job
    return _plain(slurm or os.environ.get("RAY_NODE_ID", "")[:12] or os.environ.get("POD_UID", "")[:12])


def default_node(run_dir: Path) -> str:
    """Return a node's name from its existing run folder: host and allocation, or host and folder."""
    return f"{_plain(socket.gethostname())[:HOST_LENGTH]}-{allocation() or short_id(str(_number(run_dir)))}"


def place_of(run_dir: Path) -> str:
    """Return a node's machine and folder, as text for people with an id that is unique to both."""
    folder = str(run_dir.absolute())
    if len(folder) > FOLDER_LENGTH:
        folder = f"…{folder[1 - FOLDER_LENGTH :]}"
    host = socket.gethostname()
    return f"{host[:HOST_LENGTH]}:{folder} ({short_id(f'{boot_id()} {host} {_number(run_dir)}')})"


def boot_id() -> str:
    """Return the id of this machine's current boot; empty: it has none."""
    return BOOT_ID.read_text("ascii").strip() if BOOT_ID.exists() else ""


def loopback_id() -> str:
    """Return the id of this process's loopback network, of which each network namespace has its own."""
    namespace = NETWORK.stat().st_ino if NETWORK.exists() else 0
    return short_id(f"{boot_id()} {namespace}" if boot_id() else f"{socket.gethostname()} {namespace}")


def _number(folder: Path) -> tuple[str, int, int]:
    state = folder.stat()
    return str(folder.resolve()), state.st_dev, state.st_ino


def short_id(text: str) -> str:
    import hashlib  # later: it loads OpenSSL, which a client without keys does not need

    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip(".-")
