"""`Samples`: single replies of the service's models, each a job of the task `sample`, and log-probs of their prompts.

Each reply has a quota, a wait for a backend, another attempt after a lost process, and a weight version, like a
rollout. The log-probs of a prompt are a job of the task `score`, once for all replies to it. The jobs of a token belong
to a session of this gateway alone; results that a killed gateway left there are dropped at the next use.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ..client.score_jobs import score_job, scores_in
from ..data.single_reply import SingleReply
from ..errors import ErrorInfo, InvalidJob, MalformedMessage, NotAllowed, ProrlError
from ..integrations.single_jobs import SingleJobs
from ..model_proxy.calls import CallRefused, ModelReply, Problem, ReplyCall, Usage
from ..security.rights import ANYBODY
from ..wire.messages.backends import BackendList, ListBackends, ListModels, ModelList
from ..wire.messages.base import POLICY, KeyRole, ModelName, new_id
from ..wire.messages.chat import ChatSettings
from ..wire.messages.jobs import EpisodeLimits, Job, Outcome, Sampling
from ..wire.records import TOP_LOGPROBS
from .connection import check_may
from .http_errors import STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..data.scores import Scores
    from ..data.trajectory import Trajectory
    from ..security.rights import Sender
    from .connection import GatewayConnection

BACKEND_WAIT_S = 60.0
"""How long a request waits for a backend."""
JOBS_LIMIT = 512
"""Most jobs of one token at the service; its further ones wait, and are not packed before."""
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
    versions: frozenset[int] = frozenset()
    """The versions that its engines serve: several only during an update."""
    scores: bool = False
    """Whether its engines give the log-probs of a prompt."""
    chat: ChatSettings = ChatSettings()
    is_adapter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Replies to prompts."""

    model: str
    """The service's name of it, or NAME@VERSION, which only weights of that version answer."""
    instances: Sequence[dict[str, Any]]
    """Fields of a `SampleInstance` for each prompt."""
    count: int = 1
    """Replies to each prompt."""
    sampling: Sampling
    """With a seed, reply i of all has `seed + i`."""
    top: int = 0
    """How many of the likeliest tokens to return for each token of a reply."""
    prompt_top: int | None = None
    """How many to return for each token of a prompt, with the token's own log-prob; None: no log-probs."""
    scored_tokens: int = LONGEST
    """Most tokens of all prompts whose log-probs may be returned."""

    def check_scored(self, tokens: int) -> None:
        """Raise `CallRefused` if the prompts have too many tokens for log-probs of each."""
        if self.prompt_top is not None and tokens > self.scored_tokens:
            words = f"the prompts have {tokens} tokens; with these log-probs and replies they may have at most"
            raise CallRefused(
                Problem.INVALID, f"{words} {self.scored_tokens}: send fewer prompts, or lower `logprobs` or `n`"
            )

    @property
    def name(self) -> str:
        """The model without a version."""
        return self.model.partition("@")[0]

    @property
    def version(self) -> str:
        """Empty: any."""
        return self.model.partition("@")[2]


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
    weight_versions: NDArray[np.int32]
    """int32 [G]"""
    top_ids: NDArray[np.int32] | None = None
    """int32 [G, K]: the likeliest tokens, the likeliest first; -1 pads rows with fewer candidates."""
    top_logprobs: NDArray[np.float32] | None = None
    """float32 [G, K]"""
    prompt_scores: Scores | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, *, top: bool = False) -> Sample:
        """Return the reply of a completed job.

        Args:
            trajectory: the job's.
            top: whether the job recorded the likeliest tokens.

        Raises:
            CallRefused: their record is missing.
        """
        result, records, mask = trajectory.result, trajectory.records, trajectory.loss_mask
        if top and records.unknown(TOP_LOGPROBS, np.flatnonzero(mask)) is not None:
            lost = result.records_dropped.get(TOP_LOGPROBS, "the engine did not give all rows")
            raise CallRefused(Problem.FAILED, f"the likeliest tokens are missing: {lost}")
        return cls(
            SingleReply.of(result.notes),
            trajectory.token_ids[~mask],
            trajectory.token_ids[mask],
            trajectory.logprobs[mask],
            trajectory.weight_versions[mask],
            *((records["top_ids"], records["top_logprobs"]) if top else ()),
        )

    @property
    def weight_version(self) -> int:
        """Of the last token."""
        return int(self.weight_versions[-1])

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
            top_ids=self.top_ids,
            top_logprobs=self.top_logprobs,
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
        self._room: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(JOBS_LIMIT))
        """For further jobs, by token."""

    async def models(self) -> dict[str, Served]:
        """Return the models that engines serve, or will once they have started, by name; `policy` if there are none.

        Raises:
            ProrlError: the backend broker did not answer.
        """
        ask = partial(self._connection.ask_backend_broker, ANYBODY)
        named: ModelList = await ask(ListModels(new_id()))
        listed: BackendList = await ask(ListBackends(new_id()))
        models = dict.fromkeys(named.models or (POLICY,), Served())
        for backend in (one.backend for one in listed.backends):
            models[backend.name] = Served(
                backend.context_tokens,
                backend.model,
                models.get(backend.name, Served()).versions | {backend.weight_version},
                backend.scores,
                backend.chat,
            )
        return models | {
            one.model: models.get(one.base, Served())._replace(
                versions=frozenset({one.weight_version}), is_adapter=True
            )
            for one in listed.adapters
        }

    async def run_all(self, sender: Sender, asked: Asked, served: Served | None = None) -> list[Sample]:
        """Return the replies to each prompt, those to one prompt side by side.

        With the first that fails the others are cancelled. A cancelled call cancels its jobs.

        Args:
            sender: whose jobs they are.
            asked: the prompts.
            served: what `check` returned.

        Raises:
            CallRefused: the model gave none; `Problem.NOT_FOUND`: the service has no such model, or no such version.
            NotAllowed: the sender's token is no trainer's.
        """
        asked.check_scored(sum(len(instance.get("token_ids", ())) for instance in asked.instances))
        record = (f"{TOP_LOGPROBS}:{asked.top}",) if asked.top else ()
        jobs: list[Job] = []
        for instance in asked.instances:
            group_id = new_id() if asked.count > 1 else ""
            jobs += [
                sample_job(asked.name, instance, _seeded(asked.sampling, number), group_id=group_id, record=record)
                for number in range(len(jobs), len(jobs) + asked.count)
            ]
        samples = [Sample.of(ended, top=asked.top > 0) for ended in await self._run(sender, jobs)]
        for sample in samples:
            _check_version(asked, sample.weight_versions)
        if asked.prompt_top is None:
            return samples
        prompts = [sample.prompt_token_ids for sample in samples[:: asked.count]]
        asked.check_scored(sum(map(len, prompts)))
        scores = await self.score(sender, asked, [(prompt, ()) for prompt in prompts], served)
        return [replace(sample, prompt_scores=scores[at // asked.count]) for at, sample in enumerate(samples)]

    async def score(
        self,
        sender: Sender,
        asked: Asked,
        texts: Sequence[tuple[NDArray[np.int32], Sequence[int]]],
        served: Served | None = None,
    ) -> list[Scores]:
        """Return the scores of texts: each token ids, int32 [T], and where its segments but the first begin.

        Raises:
            CallRefused, NotAllowed: as `run_all`.
        """
        top, served = asked.prompt_top or 0, served or await self.served(asked)
        jobs = [
            score_job(ids, segments, top, served.chat, asked.name, backend_wait_s=BACKEND_WAIT_S)
            for ids, segments in texts
        ]
        found = []
        for ended in await self._run(sender, jobs):
            found.append(scores_in(ended, top)[1])
            _check_version(asked, ended.weight_versions)
        return found

    async def check(self, asked: Asked) -> Served | None:
        """Raise `CallRefused` for an invalid model name, a version that is not current, or an engine without scores.

        The service itself checks all other names. Return the model's state if it was asked for.
        """
        if asked.version or asked.prompt_top is not None:
            return await self.served(asked)
        try:
            msgspec.convert(asked.model, ModelName)  # which has no @
        except msgspec.ValidationError:
            raise await self.unknown(asked.model) from None
        return None

    async def served(self, asked: Asked) -> Served:
        """Return the model's state now.

        Raises:
            CallRefused: no engine serves it; see `check`.
        """
        models = await self.models()
        served = models.get(asked.name)
        if served is None:
            raise unknown_model(asked.name, models)
        if asked.version and asked.version not in map(str, served.versions):
            raise _outdated(asked, served.versions)
        if asked.prompt_top is not None and served.versions and not served.scores:
            words = f"the engines of the model {asked.name!r} ({served.engine}) do not give log-probs of a prompt"
            raise CallRefused(Problem.INVALID, words)
        return served

    async def unknown(self, model: str) -> CallRefused:
        """Return the refusal of a model that the service does not have."""
        return unknown_model(model, await self.models())

    async def _run(self, sender: Sender, jobs: Sequence[Job]) -> list[Trajectory]:
        check_may(sender, KeyRole.TRAINER)
        if sender.name not in self._jobs:
            session = f"{self._prefix}-{sender.name}" if sender.name else self._prefix
            self._jobs[sender.name] = SingleJobs(partial(self._connect, session))
        room = self._room[sender.name]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ended(self._jobs[sender.name], room, job)) for job in jobs]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _ended(self, jobs: SingleJobs, room: asyncio.Semaphore, job: Job) -> Trajectory:
        try:
            async with room:
                ended = await jobs.run(job)
        except NotAllowed:
            raise
        except ProrlError as error:
            if isinstance(error, InvalidJob) and error.fields.get("field") == "model":
                raise await self.unknown(job.model) from error
            raise refused_by(error) from error
        result = ended.result
        if result.outcome != Outcome.COMPLETED:
            raise _refused(result.error or ErrorInfo("no_error", f"the request ended as {result.outcome}"))
        return ended

    async def close(self) -> None:
        for jobs in self._jobs.values():
            await jobs.close()


def sample_job(
    model: str,
    instance: dict[str, Any],
    sampling: Sampling,
    *,
    group_id: str = "",
    record: tuple[str, ...] = (),
) -> Job:
    """Return the job of one reply.

    Args:
        model: the service's name of it.
        instance: the fields of a `SampleInstance`.
        sampling: of this reply.
        group_id: shared by the replies to one prompt.
        record: what to record of the reply's tokens.
    """
    return Job(
        task="sample",
        instance=instance,
        group_id=group_id,
        sampling=sampling,
        episode=EpisodeLimits(max_turns=1, max_tokens=LONGEST),
        backend_wait_s=BACKEND_WAIT_S,
        model=model,
        record=record,
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


def _check_version(asked: Asked, versions: NDArray[np.int32]) -> None:
    """Raise `CallRefused` if weights of another version answered."""
    if asked.version and any(str(version) != asked.version for version in versions.tolist()):
        raise _outdated(asked, {*versions.tolist()})


def _outdated(asked: Asked, versions: Iterable[int]) -> CallRefused:
    there_are = ", ".join(f"{asked.name:.64}@{version}" for version in sorted(versions))
    words = f"The model `{asked.model:.100}` is not served now; there are: {there_are or 'no engines yet'}."
    return CallRefused(Problem.NOT_FOUND, words)


def unknown_model(model: str, models: Iterable[str]) -> CallRefused:
    """Return the refusal of a model that the service does not have."""
    there_are = ", ".join(sorted(models))
    return CallRefused(Problem.NOT_FOUND, f"The model `{model:.100}` does not exist; there are: {there_are}.")


def refused_by(error: ProrlError) -> CallRefused:
    """Convert an error of the service to the refusal that a client gets."""
    return _refused(error.info(), STATUSES.get(type(error), 500))


def _refused(error: ErrorInfo, status: int = 503) -> CallRefused:
    """Convert an error of a job to the refusal that its client gets."""
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
