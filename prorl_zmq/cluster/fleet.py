"""`Fleet`: keeps the wanted number of one service's jobs in Slurm."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from ..errors import SlurmFailed
from .cluster_folder import ClusterFolder
from .job_script import GROUPS, JobScripts
from .plan import Brake, plan
from .slurm import Slurm

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from .cluster_folder import Wanted
    from .job_script import Group, Kind
    from .slurm import Allocation

LOOK_S = 0.25
"""Interval at which files of the service's folder are checked: network file systems report no changes."""
FORGET_S = 3600.0
"""How long a job that squeue does not show stays known: a restarting controller may show none for a while."""

log = logging.getLogger("prorl.keep")


class Fleet:
    """A service's jobs in Slurm."""

    def __init__(self, service: Path, slurm: Slurm | None = None) -> None:
        self.folder = ClusterFolder(service)
        self.cluster = self.folder.cluster()
        self.scripts = JobScripts(self.cluster, service)
        self.slurm = slurm or Slurm()
        self._brakes = {kind: Brake(self.cluster.poll_s) for kind in GROUPS}
        self._missing_since: dict[str, float] = {}
        """Since when squeue does not show a known job."""

    def allocations(self, kinds: Collection[Kind] = GROUPS) -> dict[Kind, list[Allocation]]:
        """Return squeue's state of this service's jobs, by kind."""
        jobs = {job_id: kind for job_id, kind in self.folder.jobs().items() if kind in kinds}
        found = self.slurm.allocations(jobs)
        return {kind: [one for one in found if jobs[one.job_id] == kind] for kind in kinds}

    def submit_brokers(self) -> None:
        self.folder.note_job(self.slurm.submit(self.scripts.brokers()), "brokers")

    def look(self) -> None:
        """Compare the wanted jobs with the existing ones; submit missing jobs, and drain surplus ones."""
        known = self.folder.jobs()
        allocations = self.allocations()
        for kind in GROUPS:
            self._keep(kind, allocations[kind])
        shown = [one for kind in GROUPS for one in allocations[kind]]
        now_s, missing = time.monotonic(), known.keys() - {one.job_id for one in shown}
        self._missing_since = {job_id: self._missing_since.get(job_id, now_s) for job_id in missing}
        for job_id, since_s in self._missing_since.items():
            if now_s - since_s >= FORGET_S:
                self.folder.forget_job(job_id)

    def _keep(self, kind: Group, allocations: Sequence[Allocation]) -> None:
        wanted, group, brake = self.folder.wanted(), self.cluster.group(kind), self._brakes[kind]
        now_s = time.monotonic()
        brake.note(allocations, wanted.leaving, now_s)
        soon_s = 0.0 if group.requeue else float(group.signal_s)
        todo = plan(wanted.count(kind), group.limit, allocations, wanted.leaving, soon_s)
        if todo.leave:
            self.send_away(todo.leave)
        elif todo.submit and brake.allows(now_s):
            job_id = self.slurm.submit(self.scripts.group(kind, todo.submit))
            self.folder.note_job(job_id, kind)
            brake.submitted(job_id, now_s)
            log.info("submitted %d of %s as job %s", todo.submit, kind, job_id)

    def send_away(self, leaving: Sequence[Allocation], **counts: int) -> None:
        """End jobs for good, draining the running ones; `counts` are new wanted numbers."""
        names = [one.name for one in leaving]

        def changed(wanted: Wanted) -> Wanted:
            return msgspec.structs.replace(wanted, leaving=(*wanted.leaving, *names), **counts)

        self.folder.change(changed)
        log.info("to leave: %s", ", ".join(names))
        self.slurm.forbid_requeue(names)
        self.slurm.cancel((one.name for one in leaving if one.is_running), "USR1")
        self.slurm.cancel(one.name for one in leaving if not one.is_running)

    def end(self, kinds: Collection[Kind], limit_s: float) -> None:
        """Cancel all jobs of these kinds, and wait until they have ended.

        Raises:
            SlurmFailed: some have not after `limit_s` seconds.
        """
        until = time.monotonic() + limit_s
        self._cancel(kinds)
        while left := [one for found in self.allocations(kinds).values() for one in found]:
            if time.monotonic() > until:
                names = ", ".join(f"{one.name} ({one.state} on {one.host or 'no host'})" for one in left)
                raise SlurmFailed(f"these jobs have not ended {limit_s:.0f} s after scancel: {names}")
            time.sleep(2 * LOOK_S)
        for job_id, kind in self.folder.jobs().items():
            if kind in kinds:
                self.folder.forget_job(job_id)

    def _cancel(self, kinds: Collection[Kind]) -> None:
        found = [one for each in self.allocations(kinds).values() for one in each]
        self.slurm.forbid_requeue(one.name for one in found)
        self.slurm.cancel(one.name for one in found)
