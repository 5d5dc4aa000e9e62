"""Calls Slurm's commands (`sbatch`, `squeue`, `scancel`, `scontrol`) for this user, and parses their output.

Tasks of an array have squeue's names: `104_2`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import ConfigError, SlurmFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
LIMIT_S = 60.0
"""Longest time of one command: a busy controller answers late."""
SQUEUE_FORMAT = "%i|%A|%F|%T|%N|%L|%r"
ENDING = ("COMPLETING", "CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL")
"""States in which squeue still shows jobs that no longer run."""
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


class Allocation(NamedTuple):
    """One job, or one task of an array."""

    name: str
    """As commands accept it: `104_2`."""
    raw_id: str
    """The job's `$SLURM_JOB_ID`."""
    job_id: str
    """The array's id, as sbatch printed it."""
    state: str
    host: str
    left_s: float | None
    """Remaining seconds; None: it has no limit, or does not run yet."""
    reason: str

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"

    @property
    def is_ending(self) -> bool:
        return self.state in ENDING


def parse_squeue(text: str) -> list[Allocation]:
    """Parse the output of `squeue -h -r -o SQUEUE_FORMAT`."""
    rows = [line.split("|", 6) for line in text.splitlines() if line.count("|") >= 6]
    return [
        Allocation(name, raw_id, job_id, state, host, _seconds(left), reason)
        for name, raw_id, job_id, state, host, left, reason in rows
    ]


def parse_sbatch(text: str) -> str:
    """Return the job id that `sbatch --parsable` printed, without the cluster's name."""
    last = text.strip().splitlines()[-1:] or [""]
    job_id = last[0].partition(";")[0]
    if not job_id.isdecimal():
        raise SlurmFailed(f"sbatch printed no job id, but {text[:200]!r}")
    return job_id


def _seconds(text: str) -> float | None:
    found = _LEFT.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class Slurm:
    """The cluster of this host."""

    def __init__(self) -> None:
        if missing := [command for command in COMMANDS if shutil.which(command) is None]:
            raise ConfigError(
                f"this host has no {', '.join(missing)}: run this where Slurm's commands are, such as a login node "
                "(perhaps after `module load slurm`)"
            )

    def submit(self, script: str) -> str:
        """Submit a script; return the job's id."""
        return parse_sbatch(self._run("sbatch", "--parsable", stdin=script))

    def allocations(self, job_ids: Iterable[str]) -> list[Allocation]:
        """Return squeue's rows of these jobs and their tasks."""
        wanted = set(job_ids)
        printed = self._run("squeue", "-h", "-r", "-u", str(os.getuid()), "-o", SQUEUE_FORMAT) if wanted else ""
        return [one for one in parse_squeue(printed) if one.job_id in wanted]

    def cancel(self, names: Iterable[str], signal: Literal["", "USR1"] = "") -> None:
        """End jobs or tasks, or send their steps a signal; ignores jobs that are already gone."""
        if names := sorted(names):
            self._run("scancel", "--quiet", *([f"--signal={signal}"] if signal else []), *names)

    def forbid_requeue(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            self._run("scontrol", "update", f"JobId={name}", "Requeue=0", check=False)

    def _run(self, *command: str, stdin: str = "", check: bool = True) -> str:
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SlurmFailed(f"{command[0]}: {error}") from error
        if check and done.returncode:
            raise SlurmFailed(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip() or done.returncode}")
        return done.stdout
