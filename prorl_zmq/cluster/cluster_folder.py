"""`ClusterFolder`: the state of `prorl up --slurm` in the service's folder, for commands on any host that sees it.

    DIR/slurm/cluster.json   the checked cluster file
    DIR/slurm/wanted.json    how many nodes and engine hosts are wanted, and which jobs must leave
    DIR/slurm/jobs/ID        one file per submitted job: `nodes`, `engines` or `brokers`
    DIR/slurm/keeper         locked by the process that runs the brokers and submits jobs, while it lives
    DIR/slurm/logs/          logs of the jobs and of the keeper

Commands replace `wanted.json` under a lock; the keeper reads it and acts.
"""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..errors import ConfigError
from ..service.service_folder import write_whole
from ..system.held_file import held, holder
from .cluster_file import ClusterFile
from .job_script import Group, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ..system.held_file import HeldFile

KEEPER = "keeper"
T = TypeVar("T")


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wanted state of the service."""

    nodes: int = 0
    engines: int = 0
    leaving: tuple[str, ...] = ()
    """Jobs and tasks that were asked to leave, and no longer count."""
    stop: bool = False
    """End everything: `prorl down`."""

    def count(self, kind: Group) -> int:
        return self.nodes if kind == "nodes" else self.engines


class ClusterFolder:
    """DIR/slurm of a service's folder."""

    def __init__(self, service: Path) -> None:
        self.service = service
        self.path = service / "slurm"

    def begin(self, cluster: ClusterFile) -> None:
        """Make the folder, or reset it to a new cluster file and its counts; known jobs stay known."""
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
        """Replace the wanted state, under a lock."""
        with (self.path / "lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # network file systems support these locks
            changed = how(self.wanted())
            self._write("wanted.json", changed)
        return changed

    def note_job(self, job_id: str, kind: Kind) -> None:
        write_whole(self.path / "jobs" / job_id, kind)

    def forget_job(self, job_id: str) -> None:
        (self.path / "jobs" / job_id).unlink(missing_ok=True)

    def jobs(self) -> dict[str, Kind]:
        """Return the kinds of this service's submitted jobs, by id."""
        texts = {path.name: path.read_text(encoding="ascii") for path in (self.path / "jobs").glob("[0-9]*")}
        return msgspec.convert(texts, dict[str, Kind])

    def kept(self, *, take_over: bool = False) -> AbstractContextManager[HeldFile]:
        """Become the keeper; raise `EndpointInUse` if another process is."""
        return held(self.path / KEEPER, take_over=take_over)

    def keeper(self) -> str:
        """Return the keeper's process; empty: none."""
        return holder(self.path / KEEPER)

    def _read(self, name: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.service} was not started with `prorl up --slurm FILE`: start and end each `prorl node`, and "
                "`prorl serve`, where it is; SIGTERM or Ctrl-C drains a node, and ends it"
            ) from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path / name} is damaged: {error}") from error

    def _write(self, name: str, content: object) -> None:
        write_whole(self.path / name, msgspec.json.format(msgspec.json.encode(content)).decode())
