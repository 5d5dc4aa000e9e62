from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq import Sampling
from prorl_zmq.errors import InvalidJob
from prorl_zmq.integrations.sampling import sampling_of


def test_what_skyrl_gives_its_engines() -> None:
    """As `get_sampling_params_for_backend` makes it of SkyRL's defaults."""
    parameters = {
        "max_tokens": 64,
        "min_tokens": 1,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 1,
        "stop": None,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
    }
    assert sampling_of(parameters) == Sampling(max_tokens=64, top_p=0.9)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, Sampling()),
        ({"stop": "</a>"}, Sampling(stop=("</a>",))),
        ({"stop": ["</a>", "b"], "stop_token_ids": [1, 2]}, Sampling(stop=("</a>", "b"), stop_token_ids=(1, 2))),
        ({"seed": 7, "top_k": 20, "temperature": None}, Sampling(seed=7, top_k=20)),
    ],
)
def test_what_has_our_names(parameters: dict[str, Any], expected: Sampling) -> None:
    assert sampling_of(parameters) == expected


@pytest.mark.parametrize(
    "parameters",
    [{"repetition_penalty": 1.2}, {"n": 4}, {"min_tokens": 9}, {"other": 1}, {"temperature": -1.0}, {"top_p": "all"}],
)
def test_what_cannot_be_had_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"sampling parameter|temperature|top_p"):
        sampling_of(parameters)
