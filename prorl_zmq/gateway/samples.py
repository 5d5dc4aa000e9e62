"""`Samples`: single replies of the service's models, each a job of the task `sample`.

So a reply has what a rollout has: its quota, its wait for a backend, another attempt after a lost process, the version
of the weights. The jobs of a token belong to a session of this gateway alone; results that a killed gateway left there
are dropped at the next use.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..data.single_reply import SingleReply
from ..errors import ErrorInfo, InvalidJob, MalformedMessage, NotAllowed, ProrlError
from ..integrations.single_jobs import SingleJobs
from ..model_proxy.calls import CallRefused, ModelReply, Problem, ReplyCall, Usage
from ..security.rights import ANYBODY
from ..wire.messages.backends import BackendList, ListBackends
from ..wire.messages.base import POLICY, KeyRole, ModelName, new_id
from ..wire.messages.jobs import EpisodeLimits, Job, Outcome, Sampling
from .connection import check_may
from .http_errors import STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..data.trajectory import Trajectory
    from ..security.rights import Sender
    from .connection import GatewayConnection

BACKEND_WAIT_S = 60.0
"""How long a request waits for a backend."""
CHOICES_LIMIT = 128
"""Most replies to one request."""
LONGEST = 2**31 - 1
"""Tokens: more than any context."""
BUSY = frozenset({"no_backend", "no_stage", "busy"})
"""Codes of errors of a service that is full, or has no engine for the model now."""


class Served(NamedTuple):
    """A model."""

    context_tokens: int = 0
    """0: not known."""
    engine: str = ""
    """The name that its engine reports; empty: not known."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A reply with its tokens."""

    reply: SingleReply
    prompt_token_ids: NDArray[np.int32]
    """int32 [P]"""
    token_ids: NDArray[np.int32]
    """int32 [G]"""
    logprobs: NDArray[np.float32]
    """float32 [G]"""
    weight_version: int
    """Of the last token."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Sample:
        """Return the reply of an ended job.

        Raises:
            CallRefused: the job has none.
        """
        result = trajectory.result
        if result.outcome != Outcome.COMPLETED:
            raise _refused(result.error or ErrorInfo("no_error", f"the request ended as {result.outcome}"))
        mask = trajectory.loss_mask
        return cls(
            SingleReply.of(result.notes),
            trajectory.token_ids[~mask],
            trajectory.token_ids[mask],
            trajectory.logprobs[mask],
            int(trajectory.weight_versions[mask][-1]),
        )

    def as_turn(self, turn_id: str) -> ModelReply:
        """Return the reply as the dialects of `model_proxy` write it."""
        reply, generated = self.reply, len(self.token_ids)
        return ModelReply(
            turn_id=turn_id,
            text=reply.text,
            reasoning=reply.reasoning,
            calls=tuple(ReplyCall(one.call_id, one.name, one.arguments) for one in reply.calls),
            finish_reason=reply.finish_reason,
            usage=Usage(len(self.prompt_token_ids), reply.cached_tokens, generated, reply.reasoning_tokens),
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            stopped_by=reply.stopped_by,
        )


class Samples:
    """Runs the jobs; `close` it.

    Args:
        connection: to the brokers.
        connect: opens a client of a session.
        name: the gateway's.
    """

    def __init__(self, connection: GatewayConnection, connect: Callable[[str], AsyncRolloutClient], name: str) -> None:
        self._connection = connection
        self._connect = connect
        self._prefix = f"samples-{zlib.crc32(name.encode()):08x}"
        self._jobs: dict[str, SingleJobs] = {}
        """By token."""

    async def models(self) -> dict[str, Served]:
        """Return the models that engines serve, or will once they have started, by name."""
        listed: BackendList = await self._connection.ask_backend_broker(ANYBODY, ListBackends(new_id()))
        models = dict.fromkeys((POLICY, *(start.name for start in listed.starts)), Served())
        return models | {
            one.backend.name: Served(one.backend.context_tokens, one.backend.model) for one in listed.backends
        }

    async def run(self, sender: Sender, job: Job) -> Sample:
        """Return the reply of a job of the task `sample`. A cancelled call cancels its job.

        Raises:
            CallRefused: the model gave none; `Problem.NOT_FOUND`: the service has no such model.
            NotAllowed: the sender's token is no trainer's.
        """
        check_may(sender, KeyRole.TRAINER)
        if sender.name not in self._jobs:
            session = f"{self._prefix}-{sender.name}" if sender.name else self._prefix
            self._jobs[sender.name] = SingleJobs(partial(self._connect, session))
        try:
            return Sample.of(await self._jobs[sender.name].run(job))
        except NotAllowed:
            raise
        except ProrlError as error:
            if isinstance(error, InvalidJob) and error.fields.get("field") == "model":
                raise await self.unknown(job.model) from error
            raise _refused(error.info(), STATUSES.get(type(error), 500)) from error

    async def run_all(
        self, sender: Sender, model: str, instances: Sequence[dict[str, Any]], count: int, sampling: Sampling
    ) -> list[Sample]:
        """Return `count` replies to each prompt, those to one prompt side by side.

        With the first that fails the others are cancelled. With a seed, reply i of all has `seed + i`.

        Raises:
            CallRefused, NotAllowed: as `run`.
        """
        tasks: list[asyncio.Task[Sample]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for instance in instances:
                    group_id = new_id() if count > 1 else ""
                    for _ in range(count):
                        job = sample_job(model, instance, _seeded(sampling, len(tasks)), group_id=group_id)
                        tasks.append(group.create_task(self.run(sender, job)))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def unknown(self, model: str) -> CallRefused:
        """Return the refusal of a model that the service does not have."""
        there_are = ", ".join(sorted(await self.models()))
        return CallRefused(Problem.NOT_FOUND, f"The model `{model:.100}` does not exist; there are: {there_are}.")

    async def check_model(self, model: str) -> None:
        """Raise `CallRefused` for a name that no model can have; the service checks the others."""
        try:
            msgspec.convert(model, ModelName)
        except msgspec.ValidationError:
            raise await self.unknown(model) from None

    async def close(self) -> None:
        for jobs in self._jobs.values():
            await jobs.close()


def sample_job(model: str, instance: dict[str, Any], sampling: Sampling, *, group_id: str = "") -> Job:
    """Return the job of one reply.

    Args:
        model: the service's name of it.
        instance: the fields of a `SampleInstance`.
        sampling: of this reply.
        group_id: shared by the replies to one prompt.
    """
    return Job(
        task="sample",
        instance=instance,
        group_id=group_id,
        sampling=sampling,
        episode=EpisodeLimits(max_turns=1, max_tokens=LONGEST),
        backend_wait_s=BACKEND_WAIT_S,
        model=model,
    )


def _seeded(sampling: Sampling, number: int) -> Sampling:
    seed = sampling.seed
    return sampling if seed is None else msgspec.structs.replace(sampling, seed=(seed + number) % 2**63)


def checked_sampling(**fields: Any) -> Sampling:
    """Return the sampling of a request, whose fields that are None have their defaults.

    Raises:
        CallRefused: a value is outside of its range.
    """
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, Sampling)
    except msgspec.ValidationError as error:
        raise CallRefused(Problem.INVALID, f"the sampling is wrong: {error}") from None


def _refused(error: ErrorInfo, status: int = 503) -> CallRefused:
    """Return what a client is told of an error of its job."""
    fields = error.fields
    named = fields.get("problem")
    if error.code == InvalidJob.code and named in tuple(Problem):
        tokens, limit = (int(fields.get(name) or 0) for name in ("tokens", "limit"))
        return CallRefused(Problem(str(named)), error.message, tokens=tokens, limit=limit)
    if error.code in BUSY or status == 429:
        return CallRefused(Problem.BUSY, error.message)
    if status == 413:
        return CallRefused(Problem.TOO_LARGE, error.message)
    if error.code in (InvalidJob.code, MalformedMessage.code) or fields.get("refused"):
        return CallRefused(Problem.INVALID, error.message)
    return CallRefused(Problem.FAILED, f"service unavailable: {error.message}")
