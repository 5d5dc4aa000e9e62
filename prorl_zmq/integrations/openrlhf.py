"""OpenRLHF: an agent executor that has each rollout made by the service (after `openrlhf/utils/agent.py`).

    # agent.py, for `--train.agent_func_path agent.py --data.label_key job`
    from prorl_zmq.integrations.openrlhf import agent_executor

    AgentExecutor = agent_executor()

Written against OpenRLHF 0.11.2, whose trainer was not run here. The data set's label column holds a row of
`dataset_rows` as JSON, with `task` and `instance`. OpenRLHF pushes weights to its own engines only: have the service's
load its checkpoints (`prorl backends update-weights`), and correct for what is older by `rollout_log_probs`.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from ..client.asynchronous.client import AsyncRolloutClient
from ..errors import InvalidJob, NotTrainable
from .dataset_rows import job_maker, of_prompt
from .sampling import sampling_of
from .single_jobs import SingleJobs, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..data.rows import Row
    from ..wire.messages.jobs import Job

TRIES = 3
"""How often a prompt is rolled out until it can be trained on: OpenRLHF has no word for one that failed."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")

log = logging.getLogger(__name__)


def agent_executor(
    make_job: Callable[[str, str], Job] | None = None, connect: Callable[[], AsyncRolloutClient] = AsyncRolloutClient
) -> type:
    """Return the class `AgentExecutor` that OpenRLHF looks for in its agent file; needs OpenRLHF.

    Args:
        make_job: makes a job of a prompt and its label; None: the label is a row of `dataset_rows` as JSON.
        connect: opens a client; by default that of `prorl serve` without a topology file.
    """
    from openrlhf.utils.agent import AgentExecutorBase

    maker = make_job if make_job is not None else _job_of_label

    class AgentExecutor(AgentExecutorBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self._jobs = SingleJobs(connect)

        async def execute(
            self,
            prompt: str,
            label: str,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: object,  # noqa: ARG002 - OpenRLHF passes it
            llm_engine: object,  # noqa: ARG002 - OpenRLHF passes it
            images: object = None,
        ) -> dict[str, Any]:
            """Return one rollout under OpenRLHF's names.

            Raises:
                InvalidJob: the label makes no job, or there are images.
                NotTrainable: no rollout could be trained on within `TRIES`.
            """
            if images:
                raise InvalidJob("images go to the service in the job's instance, not as images", field="images")
            sampling = sampling_of({name: getattr(sampling_params, name, None) for name in SAMPLING})
            job = maker(prompt, label)
            tries = 0
            while True:
                trajectory = await self._jobs.run(of_prompt(job, sampling))
                try:
                    return {"prompt": prompt, "label": label} | response(row_of(trajectory, "OpenRLHF"), max_length)
                except NotTrainable as error:
                    tries += 1
                    if tries == TRIES:
                        raise
                    log.warning("%s; it is rolled out again", error)

    return AgentExecutor


def response(row: Row, max_length: int) -> dict[str, Any]:
    """Return a row under the names of OpenRLHF's responses, cut to `max_length` tokens and then marked as truncated.

    Raises:
        NotTrainable: none of the policy's tokens lies within `max_length`.
    """
    mask = row.arrays.loss_mask[:max_length]
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    if not edges:
        raise NotTrainable(
            f"job {row.trajectory.job_id} has {row.prompt_tokens} tokens before the policy's first, and max_length is "
            f"{max_length}",
            job_id=row.trajectory.job_id,
        )
    return {
        "images": None,
        "mm_train_inputs": None,
        "reward": row.reward,
        "scores": row.reward,
        "observation_tokens": row.arrays.token_ids[:max_length].tolist(),
        "action_ranges": list(zip(edges[::2], edges[1::2], strict=True)),
        "rollout_log_probs": row.arrays.logprobs[:max_length].tolist(),
        "truncated": row.truncated or len(row) > max_length,
        "extra_logs": {"weight_version": float(row.versions[0])},
    }


def _job_of_label(prompt: str, label: str) -> Job:  # noqa: ARG001 - a maker's arguments
    try:
        row = json.loads(label)
    except (TypeError, ValueError) as error:
        raise InvalidJob(
            f"the label is no JSON ({error}); name the column of rows with --data.label_key", field="label"
        ) from error
    if not isinstance(row, dict):
        raise InvalidJob("the label is no JSON object with task and instance", field="label")
    return job_maker()(row)
