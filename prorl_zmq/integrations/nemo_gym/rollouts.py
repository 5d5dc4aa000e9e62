"""Rolls out rows of NeMo Gym's data one by one, for `agent.ProrlAgent`; does not need NeMo Gym.

A rollout without a reward is reported as a failure, never as a number or an exception: any HTTP status except 200 ends
Gym's whole collection.

- Errors that would recur (`USELESS`) are terminal.
- A job that ended without a reward, or cannot be trained on, is made again by a resumed run.
- If the service does not answer, or lost its jobs, no row is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import Busy, ErrorInfo, InternalError, InvalidJob, JobTooLarge, NotTrainable, ProrlError, UnknownTask
from ...wire.messages.jobs import EpisodeLimits
from ..dataset_rows import job_maker
from ..sampling import sampling_of
from ..single_jobs import SingleJobs, row_of
from .response import NO_PERSIST, TERMINAL, failure, rollout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...client.asynchronous.client import AsyncRolloutClient
    from ...data.trajectory import Trajectory
    from ...wire.messages.jobs import Job

USELESS = frozenset(error.code for error in (UnknownTask, InvalidJob, JobTooLarge))
"""Errors that recur for the same row."""
SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""Sampling parameters in a row's `responses_create_params`, and their names in `Sampling`."""

log = logging.getLogger(__name__)


class GymRollouts:
    """Makes the rollouts that NeMo Gym requests. All calls must be on one asyncio loop.

    Args:
        connect: opens the client, at the first rollout.
        task: the task of rows without a column `task`.
        sampling: default sampling of rows, under the names of `Sampling`.
        episode: the jobs' limits, under the names of `EpisodeLimits`.
        wait_s: longest time in seconds for one rollout, including time in queues; its job is then cancelled. None: only
            the job's own limits.

    Raises:
        InvalidJob: `sampling` or `episode` has an unknown name or invalid value.
    """

    def __init__(
        self,
        connect: Callable[[], AsyncRolloutClient],
        *,
        task: str = "",
        sampling: Mapping[str, Any] | None = None,
        episode: Mapping[str, Any] | None = None,
        wait_s: float | None = None,
    ) -> None:
        self._jobs = SingleJobs(connect)
        self._columns = {"task": task} if task else {}
        self._sampling = dict(sampling or {})
        sampling_of(self._sampling)
        self._make_job = job_maker(_limits(episode or {}))
        self._wait_s = wait_s

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return `response.rollout` or `response.failure` for one row; never raises `Exception`."""
        job_id = ""
        try:
            job = self._job(request)
            job_id = job.job_id
            async with asyncio.timeout(self._wait_s):
                trajectory = await self._rolled_out(job)
            return rollout(request, row_of(trajectory, "NeMo Gym"), time.time())
        except NotTrainable as error:  # the job ended with an error, or its rollout is not trainable
            info = trajectory.error if trajectory.reward is None and trajectory.error is not None else error.info()
            mark = TERMINAL if info.code in USELESS else ""
        except TimeoutError:
            info, mark = ErrorInfo("wait_limit", f"no rollout came within wait_s = {self._wait_s:g} s"), ""
        except ProrlError as error:
            info, mark = error.info(), TERMINAL if error.code in USELESS else NO_PERSIST
        except Exception as error:  # a bug must cost only this rollout
            log.warning("a fault of prorl_zmq", exc_info=True)
            info, mark = InternalError(repr(error)).info(), ""
        log.warning("task %s has no rollout: %s: %s", request.get("_ng_task_index"), info.code, info.message)
        return failure(request, info, job_id, time.time(), mark)

    async def close(self) -> None:
        """Close the client."""
        await self._jobs.close()

    async def _rolled_out(self, job: Job) -> Trajectory:
        while True:
            try:
                return await self._jobs.run(job)
            except Busy:  # all rows come at once; the client already waited between its tries
                log.info("the service is full; job %s continues to wait", job.job_id)

    def _job(self, request: Mapping[str, Any]) -> Job:
        """Make a row's job. Rollouts of one row share the group's id, so that one backend can serve them all.

        The index is Gym's; NeMo RL numbers no rows, and a user's own index may be any text.
        """
        job = self._make_job({**self._columns, **request})
        parameters = request.get("responses_create_params") or {}
        given = {ours: parameters[theirs] for theirs, ours in SAMPLING.items() if parameters.get(theirs) is not None}
        index = request.get("_ng_task_index")
        if not isinstance(index, int):
            index = hashlib.blake2b(msgspec.json.encode([job.task, job.instance]), digest_size=12).hexdigest()
        return msgspec.structs.replace(job, group_id=f"gym-{index}", sampling=sampling_of(self._sampling | given))


def _limits(episode: Mapping[str, Any]) -> EpisodeLimits:
    try:
        return msgspec.convert(dict(episode), EpisodeLimits)
    except msgspec.ValidationError as error:
        raise InvalidJob(f"episode limits: {error}", field="episode") from None
