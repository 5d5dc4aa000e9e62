"""AReaL: a `RolloutWorkflow` whose episodes are made by the service (after `areal/api/workflow_api.py`).

    trainer.train(workflow="prorl_zmq.integrations.areal.ServiceWorkflow", workflow_kwargs={"endpoint": "tcp://…"})

Needs AReaL. Written against AReaL 1.0.4, whose trainer was not run here. Its staleness control counts its own versions:
publish the weights of each step to the service under the same number (`WeightsPublisher`). A rollout that cannot be
trained on raises, so that AReaL rejects its whole group; of a group with a part missing it would take the rest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from areal.api.workflow_api import RolloutWorkflow

from ..client.asynchronous.client import AsyncRolloutClient
from ..wire.messages.jobs import Sampling
from .dataset_rows import job_maker, of_prompt
from .single_jobs import SingleJobs, row_of

if TYPE_CHECKING:
    from ..data.rows import Row
    from .dataset_rows import JobMaker


class ServiceWorkflow(RolloutWorkflow):  # type: ignore[misc]
    """Makes each episode at the service.

    Args:
        endpoint: the service's front door; None: that of `prorl serve` without a topology file.
        keys: the folder of keys, if the service requires them.
        make_job: makes the job of a data set's row; None: from its columns `task` and `instance` (`dataset_rows`).
        sampling: how tokens are drawn; lengths stay the job's.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        keys: str | None = None,
        make_job: JobMaker | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._make_job = make_job if make_job is not None else job_maker()
        self._sampling = sampling if sampling is not None else Sampling()
        self._jobs = SingleJobs(partial(AsyncRolloutClient, endpoint, keys=keys))

    async def arun_episode(self, engine: object, data: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - AReaL's contract
        """Return one rollout as `tensors` gives it.

        Raises:
            InvalidJob: the row makes no job.
            NotTrainable: the rollout cannot be trained on, or has several segments.
        """
        trajectory = await self._jobs.run(of_prompt(self._make_job(data), self._sampling))
        return tensors(row_of(trajectory, "AReaL"))

    async def close(self) -> None:
        """Close the client; AReaL itself leaves it open until its process ends."""
        await self._jobs.close()


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
