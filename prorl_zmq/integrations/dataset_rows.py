"""Converts between jobs and a framework's data set rows with the columns `task` and `instance`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import InvalidJob
from ..wire.messages.base import new_id
from ..wire.messages.jobs import EpisodeLimits, Job, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    JobMaker = Callable[[Mapping[str, Any]], Job]

COLUMNS = ("task", "instance")


def dataset_rows(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Return rows for `datasets.Dataset.from_list`: `prompt` (for people only), `task`, and `instance` as JSON."""
    rows = []
    for job in jobs:
        instance = json.dumps(job.instance, ensure_ascii=False)
        rows.append({"prompt": [{"role": "user", "content": instance}], "task": job.task, "instance": instance})
    return rows


def job_maker(episode: EpisodeLimits | None = None, max_tokens: int = 1024) -> JobMaker:
    """Return a function that makes a row's job.

    Args:
        episode: the jobs' limits; None: the default ones.
        max_tokens: most tokens of one turn.
    """

    def make_job(row: Mapping[str, Any]) -> Job:
        """Make the job of a row; `InvalidJob` names a column that is missing or malformed."""
        if lacking := [name for name in COLUMNS if row.get(name) in (None, "")]:
            raise InvalidJob(
                f"the data set has rows without {' and '.join(lacking)} (columns: {', '.join(row)}); "
                "make it with dataset_rows, or give make_job",
                field=lacking[0],
            )
        instance = row["instance"]
        try:
            fields = json.loads(instance) if isinstance(instance, str) else instance
            # A column of structures has the fields of all rows, None where a row has no such field.
            fields = {name: value for name, value in fields.items() if value is not None}
            return Job(
                task=row["task"],
                instance=fields,
                sampling=Sampling(max_tokens=max_tokens),
                episode=episode if episode is not None else EpisodeLimits(),
            )
        except (AttributeError, ValueError) as error:
            raise InvalidJob(f"the column instance holds no object: {error}", field="instance") from error

    return make_job


def of_prompt(job: Job, sampling: Sampling) -> Job:
    """Return a job as a batch's prompt: with a new id and the trainer's sampling; lengths and stops stay the job's."""
    drawn = msgspec.structs.replace(
        sampling,
        max_tokens=job.sampling.max_tokens,
        stop=job.sampling.stop,
        stop_token_ids=job.sampling.stop_token_ids,
    )
    return msgspec.structs.replace(job, job_id=new_id(), sampling=drawn)
