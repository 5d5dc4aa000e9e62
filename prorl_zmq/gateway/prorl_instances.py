"""Converts the requests of ProRL's clients to jobs.

An instance is a whole job (`task`, `instance`), a `task` with the fields of its instance, or a row of any known format.
Sampling parameters that the engines do not support are rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import InvalidJob, InvalidRecord
from ..integrations.sampling import sampling_of
from ..tasks.loading import read_row
from ..wire.messages.base import new_id
from ..wire.messages.jobs import EpisodeLimits, Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..tasks.row_format import RowFormat

SAMPLING = {"max_output_tokens": "max_tokens"}
"""ProRL's names of fields of `Sampling`; others are vLLM's."""
EPISODE = {"max_iterations": "max_turns", "max_model_len": "max_tokens"}
"""ProRL's names of fields of `EpisodeLimits`."""
OF_THE_ENGINE = frozenset(
    {
        *("model", "api_key", "base_url", "modify_params", "log_completions", "native_tool_calling"),
        *("token_level_generation", "custom_tokenizer", "ensure_thinking_end_properly"),
    }
)
"""Ignored parameters: the backend decides on engine and chat template, and tokens are always returned."""


def job_of(instance: Any, parameters: Any, row_formats: Sequence[RowFormat]) -> Job:
    """Return the job of a request, with a new id.

    Raises:
        InvalidRecord: the instance has no known form.
        InvalidJob: a parameter is unknown, or has an invalid value.
    """
    if not isinstance(instance, dict) or not isinstance(parameters, dict):
        raise InvalidRecord("`instance` and `sampling_params` are objects")
    job = _job(instance, row_formats)
    given = {name: value for name, value in parameters.items() if value is not None and name not in OF_THE_ENGINE}
    episode = {ours: given.pop(theirs) for theirs, ours in EPISODE.items() if theirs in given}
    sampling = {SAMPLING.get(name, name): value for name, value in given.items()}
    return msgspec.structs.replace(
        job,
        job_id=new_id(),
        sampling=sampling_of({**msgspec.to_builtins(job.sampling), **sampling}),
        episode=_limits({**msgspec.to_builtins(job.episode), **episode}),
    )


def _job(instance: Mapping[str, Any], row_formats: Sequence[RowFormat]) -> Job:
    task = instance.get("task")
    if isinstance(task, str) and "instance" not in instance and any(each.task == task for each in row_formats):
        fields = {name: value for name, value in instance.items() if name != "task"}
        return Job(task=task, instance=fields)
    return read_row(1, instance, row_formats).job


def _limits(limits: Mapping[str, Any]) -> EpisodeLimits:
    try:
        return msgspec.convert(limits, EpisodeLimits)
    except msgspec.ValidationError as error:
        raise InvalidJob(f"limits of the episode: {error}", field="episode") from None
