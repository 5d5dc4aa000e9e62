"""The demo's prompts as plain jobs, several for each."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from prorl_zmq.demo.tasks import make_prompts
from prorl_zmq.wire.messages.base import new_id

if TYPE_CHECKING:
    from prorl_zmq import Job

replace = msgspec.structs.replace


def make_jobs(groups: int, group_size: int, seed: int, name: str = "") -> list[Job]:
    """Make `group_size` jobs for each of `groups` prompts; the same seed and name give the same jobs."""
    name = name or new_id()
    jobs = []
    for number, prompt in enumerate(islice(make_prompts(seed), groups)):
        group_id = f"{name}-{number}"
        for index in range(group_size):
            sampling = replace(prompt.sampling, seed=seed * 1000 + len(jobs))
            jobs.append(replace(prompt, job_id=f"{group_id}-{index}", group_id=group_id, sampling=sampling))
    return jobs
