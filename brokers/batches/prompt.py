"""`Prompt`: a job template fed to a batch, from which the jobs of a group are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...wire import codec

if TYPE_CHECKING:
    from ...wire.messages.jobs import Job

SEED_STEP = 0x9E3779B97F4A7C15
"""An odd number whose multiples spread over all 63 bits (from the golden ratio)."""


class Prompt(NamedTuple):
    number: int
    """Number of the prompt's note in the journal."""
    session: str
    job: Job
    size_bytes: int

    def make_job(self, group_id: str, job_id: str) -> tuple[Job, bytes]:
        """Make and pack one of a group's jobs; a template's seed is varied per job."""
        sampling = self.job.sampling
        if sampling.seed is not None:
            ordinal = int(job_id.rpartition(".")[2])
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + ordinal * SEED_STEP) % 2**63)
        job = msgspec.structs.replace(self.job, job_id=job_id, group_id=group_id, sampling=sampling)
        return job, codec.encode(job)
