"""What `prorl up --slurm` keeps in the service's folder, so that any host that sees it can steer the service.

    DIR/slurm/cluster.json   the cluster file as it was checked
    DIR/slurm/wanted.json    how many nodes and engine hosts there should be, and which jobs are to leave
    DIR/slurm/jobs/ID        one file per submitted job: `nodes`, `engines` or `brokers`
    DIR/slurm/keeper.json    the process that runs the brokers and submits jobs, while it lives
    DIR/slurm/logs/          what the jobs and the keeper say

Commands write `wanted.json`, under a lock and in one step; the keeper reads it and acts. A command never has to find
the keeper's process, but to end one that does not act.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from ..errors import ConfigError
from .cluster_file import ClusterFile
from .job_script import Group, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the service should have."""

    nodes: int = 0
    engines: int = 0
    leaving: tuple[str, ...] = ()
    """Jobs and tasks that were told to go, and count no more."""
    stop: bool = False
    """Nothing: `prorl down`."""

    def count(self, kind: Group) -> int:
        return self.nodes if kind == "nodes" else self.engines


class KeeperRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who runs the brokers."""

    host: str
    pid: int
    born: int
    """When the process started, in the kernel's ticks: a pid may be another process's by now."""
    allocation: str = ""
    """The brokers' job, if they run in one."""
    started_at: float = 0.0

    @classmethod
    def own(cls) -> Self:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _born(pid), os.environ.get("SLURM_JOB_ID", ""), time.time())

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether the process is there; only its own host knows."""
        with contextlib.suppress(OSError):
            return _born(self.pid) == self.born
        return False


def _born(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])


class ClusterFolder:
    """DIR/slurm of a service's folder."""

    def __init__(self, service: Path) -> None:
        self.service = service
        self.path = service / "slurm"

    def begin(self, cluster: ClusterFile) -> None:
        """Make the folder, or set it to a new cluster file and its counts; the jobs that it knows stay known."""
        for each in (self.path, self.path / "jobs", self.path / "logs"):
            each.mkdir(mode=0o700, exist_ok=True)
        self._write("cluster.json", cluster)
        self._write("wanted.json", Wanted(cluster.nodes.count, cluster.engines.count))

    def cluster(self) -> ClusterFile:
        return self._read("cluster.json", ClusterFile)

    def wanted(self) -> Wanted:
        return self._read("wanted.json", Wanted)

    def wanted_changed_at(self) -> int:
        return (self.path / "wanted.json").stat().st_mtime_ns

    def change(self, how: Callable[[Wanted], Wanted]) -> Wanted:
        """Replace what is wanted, while nobody else does."""
        with (self.path / "lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # network file systems have locks of this kind
            changed = how(self.wanted())
            self._write("wanted.json", changed)
        return changed

    def note_job(self, job_id: str, kind: Kind) -> None:
        (self.path / "jobs" / job_id).write_text(kind, encoding="ascii")

    def forget_job(self, job_id: str, older_s: float = 0.0) -> None:
        """Forget a job, if it was submitted so long ago."""
        path = self.path / "jobs" / job_id
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= older_s:
                path.unlink()

    def jobs(self) -> dict[str, Kind]:
        """Return what the jobs run that were submitted for this service, by their ids."""
        texts = {path.name: path.read_text(encoding="ascii") for path in (self.path / "jobs").iterdir()}
        return msgspec.convert(texts, dict[str, Kind])

    def keeper(self) -> KeeperRecord | None:
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode((self.path / "keeper.json").read_bytes(), type=KeeperRecord)
        return None

    def note_keeper(self) -> None:
        self._write("keeper.json", KeeperRecord.own())

    def forget_keeper(self) -> None:
        (self.path / "keeper.json").unlink(missing_ok=True)

    def _read(self, name: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except FileNotFoundError:
            raise ConfigError(f"{self.service} has no cluster: start one with `prorl up --slurm FILE`") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path / name} is damaged: {error}") from error

    def _write(self, name: str, content: object) -> None:
        """Write a file in one step: who reads it sees the old content or the new one."""
        partial = self.path / f".{name}.{socket.gethostname()}.{os.getpid()}"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        partial.replace(self.path / name)
