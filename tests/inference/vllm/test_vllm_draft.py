"""New weights of a draft model with a real vLLM: what one run of `draft_cases.py` gave."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from vllm_python import HERE, START_LIMIT_S, vllm_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(START_LIMIT_S + 60)]

CLOSE = 1e-4
"""Most that a log-prob may differ from that of transformers, in float32."""


@pytest.fixture(scope="module")
def drafts(models: list[Path], vllm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("drafts")
    out = folder / "results.json"
    done = subprocess.run(
        [vllm_python(), HERE / "inference" / "vllm" / "draft_cases.py", *models, folder, out],
        env=vllm_environment,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return {**json.loads(out.read_text()), "log": done.stderr}


def test_a_draft_model_gets_its_weights_with_the_models(drafts: Any) -> None:
    """A draft model with the model's weights proposes what the model says; one with others hardly ever does."""
    assert drafts["drafts"] is True
    swaps = drafts["swaps"]
    assert [one["spans"] for one in swaps] == [[[version, 0, 60]] for version in range(5)]
    shares = [one["accepted"] / one["proposed"] for one in swaps]
    same, other, again, kept, both = shares
    assert min(same, again, both) > 0.9
    assert max(other, kept) < 0.1


def test_the_tokens_are_those_of_an_engine_without_a_draft_model(drafts: Any) -> None:
    one, _, two = drafts["plain"]
    assert [swap["ids"] for swap in drafts["swaps"]] == [*[one["ids"]] * 3, *[two["ids"]] * 2]
    assert one["ids"] != two["ids"]
    assert max(swap["error"] for swap in drafts["swaps"]) < CLOSE


def test_bad_draft_weights_change_nothing(drafts: Any) -> None:
    cut, cast, dropped = drafts["refused"]
    assert {one["type"] for one in drafts["refused"]} == {"InvalidWeights"}
    for one in drafts["refused"]:
        assert "model.norm.weight" in one["message"]
        assert one["fields"]["path"].endswith("/draft")
    assert "in the model F32 [64]" in cut["message"]
    assert "is F64" in cast["message"]
    assert "lacks tensors that the model has" in dropped["message"]
    after, last = drafts["after"], drafts["swaps"][-1]
    assert (after["ids"], after["spans"]) == (last["ids"], last["spans"])
    assert after["accepted"] / after["proposed"] > 0.9


def test_an_engine_without_a_draft_model_says_once_that_it_ignores_its_weights(drafts: Any) -> None:
    assert [one["proposed"] for one in drafts["plain"]] == [0, 0, 0]
    assert drafts["log"].count("the engine ignores draft/ in ") == 1
