"""AReaL: a `RolloutWorkflow` whose episodes are made by the service (after `areal/api/workflow_api.py`).

    trainer.train(workflow=rollout_workflow(make_job=job_maker(), sampling=Sampling(temperature=1.0)))

Written against AReaL 1.0.4, whose trainer was not run here. AReaL's staleness control counts its own versions: publish
the weights of each step to the service under the same number (`WeightsPublisher`). A rollout that cannot be trained on
raises, so that AReaL rejects its whole group; of a group with a part missing it would take the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..client.asynchronous.client import AsyncRolloutClient
from ..wire.messages.jobs import Sampling
from .dataset_rows import job_maker, of_prompt
from .single_jobs import SingleJobs, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..data.rows import Row
    from .dataset_rows import JobMaker


def rollout_workflow(
    make_job: JobMaker | None = None,
    sampling: Sampling | None = None,
    connect: Callable[[], AsyncRolloutClient] = AsyncRolloutClient,
) -> Any:
    """Return a `RolloutWorkflow`; needs AReaL.

    Args:
        make_job: makes the job of a data set's row; None: from its columns `task` and `instance` (`dataset_rows`).
        sampling: how tokens are drawn; lengths stay the job's.
        connect: opens a client; by default that of `prorl serve` without a topology file.
    """
    from areal.api.workflow_api import RolloutWorkflow

    maker = make_job if make_job is not None else job_maker()
    drawn = sampling if sampling is not None else Sampling()
    jobs = SingleJobs(connect)

    class Workflow(RolloutWorkflow):  # type: ignore[misc]
        async def arun_episode(self, engine: object, data: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - AReaL's contract
            """Return one rollout as tensors of one row.

            Raises:
                InvalidJob: the row makes no job.
                NotTrainable: the rollout cannot be trained on, or has several segments.
            """
            return tensors(row_of(await jobs.run(of_prompt(maker(data), drawn)), "AReaL"))

    return Workflow()


def tensors(row: Row) -> dict[str, Any]:
    """Return a row of T tokens as AReaL's tensors; needs torch.

    `input_ids`, `loss_mask` and `versions` int32 [1, T], `logprobs` float32 [1, T], `attention_mask` bool [1, T],
    `rewards` float32 [1]. Where the policy generated nothing, a version is -1 and a log-prob 0.
    """
    import torch

    arrays = row.arrays
    columns = {
        "input_ids": arrays.token_ids,
        "loss_mask": arrays.loss_mask.astype(np.int32),
        "logprobs": arrays.logprobs,
        "versions": arrays.weight_versions,
        "attention_mask": np.ones(len(row), np.bool_),
    }
    found = {name: torch.from_numpy(np.array(values))[None] for name, values in columns.items()}
    return {**found, "rewards": torch.tensor([row.reward], dtype=torch.float32)}
