"""`ScoreJobs`: the jobs that score trajectories, and the scores in their results. No sockets, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..data.scores import SCORES_TOP_LIMIT, Scores, scores_of_rows
from ..errors import InvalidJob, MalformedMessage, ProrlError, from_info
from ..wire.messages.jobs import Job
from ..wire.records import TEACHER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..data.trajectory import Trajectory
    from ..wire.messages.backends import Backend
    from ..wire.messages.chat import ChatSettings

IN_FLIGHT = 16
"""Most jobs of one call at a time, which so take few of the slots of RUN."""
TASK = "score"
"""The task of the jobs, whose name for the model is `TEACHER`."""


class ScoreJobs:
    """Scores trajectories: `take` returns the jobs to submit next, and `receive` gets their results.

    Args:
        trajectories: the texts.
        model: the one that scores.
        top: how many of the likeliest tokens to list for each position.
        backends: those of the service.
        keep_errors: a trajectory that cannot be scored has its error in place of scores; otherwise it is raised.

    Raises:
        InvalidJob: `top` is over its limit, the model cannot score or has too short a context for a segment, the
            tokenizer of a trajectory is unknown, or a trajectory has tokens of several models.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        model: str,
        top: int,
        backends: Sequence[Backend],
        *,
        keep_errors: bool = False,
    ) -> None:
        if not 0 <= top <= SCORES_TOP_LIMIT:
            raise InvalidJob(f"top={top}: a position has 0 to {SCORES_TOP_LIMIT} likeliest tokens", field="top")
        self._trajectories, self._model, self._top, self._keep_errors = trajectories, model, top, keep_errors
        self._chats: dict[str, ChatSettings] = {one.backend_id: one.chat for one in backends}
        self._chats_by_model: dict[str, ChatSettings] = {
            name: one.chat for one in reversed(backends) for name in (*one.adapters, one.name)
        }
        models = [one for one in backends if model in (one.name, *one.adapters)]
        if models and not any(one.scores for one in models):
            listed = ", ".join(f"{one.backend_id} ({one.model})" for one in models)
            raise InvalidJob(f"no backend of the model {model!r} can score texts: {listed}", field="model")
        context_tokens = min((one.context_tokens for one in models if one.context_tokens), default=0)
        self._places: dict[str, int] = {}
        """The index of each job's trajectory."""
        self._scores: list[Scores | ProrlError | None] = [None] * len(trajectories)
        self._waiting: list[Job] = []
        """Those that are to be submitted, the next one last."""
        self.submitted: set[str] = set()
        """The ids of the jobs that may be at the service."""
        for index, trajectory in reversed([*enumerate(trajectories)]):
            if not len(trajectory.token_ids):
                none = np.zeros((0, top), np.float32)
                self._scores[index] = Scores(np.zeros(0, np.float32), none.astype(np.int32), none)
                continue
            try:
                job = self._job(trajectory, context_tokens)
            except InvalidJob as error:
                self._failed(index, error)
                continue
            self._places[job.job_id] = index
            self._waiting.append(job)

    @property
    def are_over(self) -> bool:
        return not (self._waiting or self.submitted)

    def take(self) -> list[Job]:
        """Return the jobs to submit now."""
        part = [self._waiting.pop() for _ in range(min(IN_FLIGHT - len(self.submitted), len(self._waiting)))]
        self.submitted.update(job.job_id for job in part)
        return part

    @property
    def scores(self) -> list[Scores | ProrlError]:
        """One for each trajectory; called when all have been received."""
        return [scores for scores in self._scores if scores is not None]

    def receive(self, result: Trajectory) -> None:
        """Take the result of a job.

        Raises:
            ProrlError: the trajectory could not be scored, and errors are not kept; its job is in the error's fields.
        """
        self.submitted.discard(result.job_id)
        index = self._places[result.job_id]
        trajectory = self._trajectories[index]
        if result.outcome != "completed":
            error = from_info(result.error) if result.error is not None else ProrlError(result.outcome)
            words = f"trajectory {index} (job {trajectory.job_id}) was not scored: {error.message}"
            self._failed(index, type(error)(words, **{**error.fields, "job_id": trajectory.job_id}))
            return
        token_ids, scores = scores_in(result, self._top)
        if not np.array_equal(token_ids, trajectory.token_ids):
            raise MalformedMessage(f"the scores of trajectory {index} are of another text")
        self._scores[index] = scores

    def _failed(self, index: int, error: ProrlError) -> None:
        if not self._keep_errors:
            raise error
        self._scores[index] = error

    def _job(self, trajectory: Trajectory, context_tokens: int) -> Job:
        result = trajectory.result
        if others := [part.name for part in result.conversations if part.model and part.segments]:
            raise InvalidJob(
                f"job {trajectory.job_id} has tokens of other models ({', '.join(others)}): score the trajectories of "
                "its `split()`",
                job_id=trajectory.job_id,
                field="model",
            )
        longest = max(len(segment.token_ids) for segment in trajectory.segments())
        if context_tokens and longest >= context_tokens:
            raise InvalidJob(
                f"job {trajectory.job_id} has a text of {longest} tokens, which is too long for the context of "
                f"{context_tokens} tokens of the model {self._model!r}: there must be room for one more token",
                job_id=trajectory.job_id,
                field="token_ids",
            )
        chat = self._chats.get(result.backend) or self._chats_by_model.get(result.model)
        if chat is None:
            raise InvalidJob(
                f"the service has neither the backend {result.backend!r} of job {trajectory.job_id} nor one of the "
                f"model {result.model!r}: their tokenizer cannot be compared with that of {self._model!r}",
                job_id=trajectory.job_id,
                field="model",
            )
        return score_job(trajectory.token_ids, result.segments, self._top, chat, self._model)


def score_job(
    token_ids: NDArray[np.int32], segments: Sequence[int], top: int, chat: ChatSettings, model: str, **more: Any
) -> Job:
    """Return the job that scores a text.

    Args:
        token_ids: the text, int32 [T].
        segments: where each of its segments but the first begins.
        top: how many of the likeliest tokens to list for each position.
        chat: of the engine whose token ids the text has.
        model: the one that scores.
        **more: fields of the job.
    """
    instance = {
        "token_ids": np.ascontiguousarray(token_ids, "<i4").tobytes(),
        "segments": list(segments),
        "top": top,
        "chat": msgspec.to_builtins(chat),
    }
    return Job(task=TASK, instance=instance, model=model, models={TEACHER: model}, **more)


def scores_in(result: Trajectory, top: int) -> tuple[NDArray[np.int32], Scores]:
    """Return the text of a completed job, and its scores."""
    return scores_of_rows(result.token_ids, result.logprobs, top, int(result.weight_versions.min()))
