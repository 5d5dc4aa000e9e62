"""What ProRL's clients ask for, as jobs."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.errors import InvalidJob, InvalidRecord, ProrlError
from prorl_zmq.gateway.prorl_instances import job_of
from prorl_zmq.stages.known_row_formats import known_row_formats

FORMATS = known_row_formats()
MATH = {"problem": "1 + 1", "ground_truth": "2"}


@pytest.mark.parametrize(
    "instance",
    [
        {"problem": "1 + 1", "answer": "2", "instance_id": "i"},
        {"task": "math", **MATH},
        {"task": "math", "instance": MATH, "job_id": "theirs"},
    ],
)
def test_an_instance_is_a_row_of_a_data_set_or_a_tasks_own(instance: dict[str, Any]) -> None:
    first, second = job_of(instance, {}, FORMATS), job_of(instance, {}, FORMATS)
    assert (first.task, {**first.instance, **MATH}) == ("math", first.instance)
    assert len({first.job_id, second.job_id, "theirs"}) == 3  # many may be asked for at once


def test_parameters_are_limits_and_sampling() -> None:
    parameters = {
        "model": "hosted_vllm/ORG/NAME",
        "api_key": "x",
        "modify_params": False,
        "log_completions": False,
        "native_tool_calling": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_output_tokens": 500,
        "max_iterations": 9,
        "token_level_generation": True,
        "custom_tokenizer": "/models/x",
        "max_model_len": 8192,
        "ensure_thinking_end_properly": True,
    }
    job = job_of({"task": "math", "instance": MATH, "episode": {"tool_call_s": 5.0}}, parameters, FORMATS)
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.max_tokens) == (0.7, 0.9, 500)
    assert (job.episode.max_turns, job.episode.max_tokens, job.episode.tool_call_s) == (9, 8192, 5.0)


@pytest.mark.parametrize(
    ("instance", "parameters", "error", "said"),
    [
        ({"foo": 1}, {}, InvalidRecord, "no known row format"),
        ("text", {}, InvalidRecord, "are objects"),
        (None, {}, InvalidRecord, "are objects"),
        (MATH, {"temperature": 9}, InvalidJob, "temperature"),
        (MATH, {"max_iterations": 0}, InvalidJob, "max_turns"),
        (MATH, {"repetition_penalty": 2.0}, InvalidJob, "repetition_penalty"),
        (MATH, [], InvalidRecord, "are objects"),
    ],
)
def test_what_cannot_be_a_job_is_refused(instance: Any, parameters: Any, error: type[ProrlError], said: str) -> None:
    with pytest.raises(error, match=said):
        job_of(instance, parameters, FORMATS)
