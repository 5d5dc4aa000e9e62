"""What an adapter asks of its rollouts beside their tokens, and the records of samples in the trainers' forms.

`Asked` is the adapters' options `model`, `record` and `teacher`. The functions return arrays over the tokens of a
sample, which may be cut shorter than its rollout. No value stands for an unknown row: a sample whose trained tokens
need an unknown row is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..data.records import needed_rows
from ..errors import ConfigError, InvalidJob, NotTrainable
from ..wire.messages.base import POLICY
from ..wire.records import EXPERTS, SAMPLING_MASK, TEACHER, Recorded, teacher_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..data.trajectory import Trajectory
    from ..wire.messages.jobs import Job
    from .session import Sample


@dataclass(frozen=True, slots=True)
class Asked:
    """The model, the records and the teacher of an adapter's jobs; what is empty stays as the job has it."""

    model: str = POLICY
    record: tuple[str, ...] = ()
    teacher: str = ""

    @classmethod
    def of(
        cls,
        framework: str,
        takes: Sequence[str],
        model: str | None,
        record: Sequence[str] | None,
        teacher: str | None = "",
    ) -> Asked:
        """Read an adapter's options; None: not set.

        Args:
            framework: its name.
            takes: the records that it has fields for.
            model: the model that rolls out.
            record: the records to ask for.
            teacher: as in `Job`.

        Raises:
            ConfigError: a record is unknown, or the framework has no field for it.
        """
        if unknown := [name for name in record or () if name not in takes]:
            problem = f"{framework} takes the records {', '.join(takes)}, not {', '.join(unknown)}"
            raise ConfigError(problem, key="record")
        return cls(model or POLICY, tuple(record or ()), teacher or "")

    @property
    def names(self) -> tuple[str, ...]:
        """The records that each rollout must have: `complete` of its batch."""
        return Recorded.parse(self.record).names + ((TEACHER,) if self.teacher else ())

    @property
    def top(self) -> int:
        """How many of the teacher's likeliest tokens there are."""
        return teacher_of(self.teacher)[1] if self.teacher else 0

    def job(self, job: Job) -> Job:
        """Return a job with what is asked for.

        Raises:
            InvalidJob: the job names another model.
        """
        if job.model not in (POLICY, self.model):
            raise InvalidJob(f"a batch of the model {self.model!r} has a job of {job.model!r}", field="model")
        changes = {"record": self.record or job.record, "teacher": self.teacher or job.teacher}
        return msgspec.structs.replace(job, model=self.model, **changes)

    def check(self, sample: Sample) -> None:
        """Refuse a sample without a record, or without a row that its training needs.

        Raises:
            NotTrainable: the message says which one; of a record that was dropped, also why.
        """
        trajectory = sample.row.trajectory
        for name in self.names:
            if name not in trajectory.records.names:
                why = trajectory.result.records_dropped.get(name, "it was not asked for")  # type: ignore[call-overload]
                raise _refused(trajectory, f"has no record {name}: {why}")
            _check_rows(sample, name)


NOTHING_ASKED = Asked()


def routes(sample: Sample) -> NDArray[Any]:
    """Return the experts of the sample's first tokens, up to an unknown row: uint8 or int16 [n, layers, k].

    Row i is the route of token i as input, by which token i + 1 was predicted.

    Raises:
        NotTrainable: the prediction of a trained token has no row.
    """
    _check_rows(sample, EXPERTS)
    records, size = sample.row.arrays.records, sample.row.prompt_tokens + sample.length
    rows, experts = records.rows(EXPERTS), records[EXPERTS]
    known = int(np.count_nonzero(rows == np.arange(len(rows))))
    experts = experts[: min(known, size)]
    return experts if experts.dtype == np.uint8 else experts.astype(np.int16)


def supports(sample: Sample) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return what sampling left for each token of the response: ids, and offsets int32 [R + 1] into them.

    A token that was not generated has an empty range.

    Raises:
        NotTrainable: a generated token has no row.
    """
    _check_rows(sample, SAMPLING_MASK)
    records, start, end = sample.row.arrays.records, sample.row.prompt_tokens, sample.row.prompt_tokens + sample.length
    rows, counts = records.rows(SAMPLING_MASK), records["mask_counts"]
    inside = (rows >= start) & (rows < end)
    by_token = np.zeros(sample.length, np.int32)
    by_token[rows[inside] - start] = counts[inside]
    first, last = int(counts[rows < start].sum()), int(counts[rows < end].sum())
    offsets = np.concatenate([[0], np.cumsum(by_token)]).astype(np.int32)
    return records["mask_ids"][first:last], offsets


def teacher_scores(sample: Sample) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Return the teacher's log-probs of all tokens of prompt and response but the first, and its likeliest tokens.

    Row i scores token i + 1: float32 [S - 1], int32 [S - 1, K] and float32 [S - 1, K].

    Raises:
        NotTrainable: a token but the first has no row.
    """
    _check_rows(sample, TEACHER)
    records, size = sample.row.arrays.records, sample.row.prompt_tokens + sample.length
    names = ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
    logprobs, top_ids, top_logprobs = (records[name][: size - 1] for name in names)
    return logprobs, top_ids, top_logprobs


def _unknown(sample: Sample, name: str) -> str:
    """Return which row of a record a sample's training needs and does not have; empty: it has all."""
    loss_mask = sample.row.arrays.loss_mask[: sample.row.prompt_tokens + sample.length]
    unknown = sample.row.arrays.records.unknown(name, needed_rows(name, loss_mask))
    if unknown is None:
        return ""
    if name == EXPERTS:
        predicted = unknown + 1 + int(np.argmax(loss_mask[unknown + 1 :]))
        return f"has no experts for the prediction of its token {predicted}"
    what = "scores of its teacher for" if name == TEACHER else f"{name.replace('_', ' ')} of"
    return f"has no {what} its token {unknown}"


def _check_rows(sample: Sample, name: str) -> None:
    if problem := _unknown(sample, name):
        raise _refused(sample.row.trajectory, problem)


def _refused(trajectory: Trajectory, problem: str) -> NotTrainable:
    job_id = trajectory.job_id
    return NotTrainable(f"job {job_id} {problem}", group_id=trajectory.group_id, job_id=job_id)
