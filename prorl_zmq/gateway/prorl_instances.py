"""What ProRL's clients ask for, as jobs: their instances are rows of data sets, and their parameters LiteLLM's.

An instance may be a whole job (`task`, `instance`), a `task` with the fields of its instances, or a row of any format
that the installation knows. Parameters that would change how tokens are drawn, and that we lack, are refused.
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
"""ProRL's names of fields of `Sampling`; the others are vLLM's."""
EPISODE = {"max_iterations": "max_turns", "max_model_len": "max_tokens"}
"""ProRL's names of fields of `EpisodeLimits`."""
OF_THE_ENGINE = frozenset(
    {
        *("model", "api_key", "base_url", "modify_params", "log_completions", "native_tool_calling"),
        *("token_level_generation", "custom_tokenizer", "ensure_thinking_end_properly"),
    }
)
"""Parameters that say nothing here: the engine and the chat template are the backend's, and tokens always come."""


def job_of(instance: Any, parameters: Any, row_formats: Sequence[RowFormat]) -> Job:
    """Return the job of a request, under an id of its own.

    Raises:
        InvalidRecord: the instance is of no known form.
        InvalidJob: a parameter is not known, or has a wrong value.
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
