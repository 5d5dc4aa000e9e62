"""vLLM's weight transfer with a real vLLM: what one run of `transfer_cases.py` gave."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from vllm_python import HERE, START_LIMIT_S, transfer_environment, vllm_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(START_LIMIT_S + 60)]

CLOSE = 1e-4
"""Most that a log-prob may differ from that of transformers, in float32."""


@pytest.fixture(scope="module")
def transfers(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    vllm_python()
    folder = tmp_path_factory.mktemp("transfers")
    out = folder / "results.json"
    done = subprocess.run(
        [vllm_python(), HERE / "inference" / "vllm" / "transfer_cases.py", *models, out],
        env=transfer_environment(folder),
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(out.read_text())


def test_weights_come_by_vllms_own_transfer(transfers: Any) -> None:
    assert transfers["description"] == ["socket", 1]
    swaps = transfers["swaps"]
    assert [one["spans"] for one in swaps] == [[[version, 0, 8]] for version in range(4)]
    assert max(one["error"] for one in swaps) < CLOSE
    assert swaps[0]["logprobs"] == swaps[2]["logprobs"]
    assert swaps[1]["logprobs"] == swaps[3]["logprobs"] != swaps[0]["logprobs"]
    assert {one["cached"] for one in swaps} == {0}


def test_a_wrong_call_changes_nothing(transfers: Any) -> None:
    for one, words in zip(transfers["wrong"], ("without a matching start", "rank_offset"), strict=True):
        assert (one["type"], one["fields"]) == ("EngineFailed", {"refused": False})
        assert words in one["message"]
    assert transfers["after_wrong"]["logprobs"] == transfers["swaps"][3]["logprobs"]


def test_a_whole_transfer_repairs_a_broken_one(transfers: Any) -> None:
    for said, words in zip(
        transfers["broken"], ("dies here", "dies here", "left the group", "left the group", "dies here"), strict=True
    ):
        assert words in said
    repaired = transfers["repaired"]
    assert [one["spans"] for one in repaired] == [[[version, 0, 8]] for version in range(4, 8)]
    assert max(one["error"] for one in repaired) < CLOSE
    assert [one["logprobs"] for one in repaired] == [transfers["swaps"][which]["logprobs"] for which in (1, 0, 1, 0)]


def test_an_update_that_ends_within_a_transfer_is_the_engines_end(transfers: Any) -> None:
    for one in transfers["lost"]:
        assert (one["type"], one["fields"].get("fatal")) == ("EngineFailed", True)
        assert "before all weights had come" in one["message"]
