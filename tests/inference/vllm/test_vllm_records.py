"""Records of a real vLLM and a tiny mixture: what one run of `record_cases.py` gave."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from record_checks import APART, EXACT
from vllm_python import START_LIMIT_S, environment, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * START_LIMIT_S)]

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
MAKE = """
import sys, pathlib, mixtures
for seed, folder in enumerate(sys.argv[2:]):
    mixtures.make_mixture(pathlib.Path(folder), sys.argv[1], seed)
"""


@pytest.fixture(scope="session", params=["qwen3_moe", "olmoe"])
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script wrote."""
    python, folder = vllm_python(), tmp_path_factory.mktemp(request.param)
    variables = environment(folder)
    for module in ("mixtures.py", "record_checks.py", "vllm_routes.py"):
        (folder / "packages" / module).symlink_to(TESTS / module)
    models, out = [str(folder / "one"), str(folder / "two")], folder / "out.json"
    for command in ([python, "-c", MAKE, request.param, *models], [python, HERE / "record_cases.py", *models, out]):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=2 * START_LIMIT_S)
        assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(out.read_text())


@pytest.fixture
def figure(figures: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """The figures of the case that the test is named after."""
    given = figures[request.node.originalname.removeprefix("test_")]
    if isinstance(given, dict) and "traceback" in given:
        pytest.fail(given["traceback"])
    return given


def test_offered(figure: Any) -> None:
    assert figure == ["top_logprobs", "sampling_mask", "experts"]


def test_routes(figure: Any) -> None:
    """Also of prefixes from the cache, prompts in parts and preempted requests."""
    assert figure["turns"] == 36
    assert figure["missing"] == 0
    assert min(figure["cached"]) > 100
    assert figure["counts"]["again"] > 0, "no request was preempted"
    assert figure["counts"]["different"] == 0
    assert figure["dtypes"] == ["uint8"]
    assert figure["with"] <= EXACT
    assert figure["without"] > APART
    assert figure["shifted"] > APART
    assert figure["reordered"] > APART


def test_masks(figure: Any) -> None:
    assert len(figure) == 6
    for one in figure:
        assert one["gap"] <= EXACT
        assert one["ratio"] == pytest.approx(1, abs=EXACT)
        assert one["bias"] < -APART
        assert 1 < one["largest"] < 1024


def test_top(figure: Any) -> None:
    assert figure["error"] <= EXACT
    assert figure["same"]
    assert figure["possible"] == figure["masked"] == [3] * 30
    assert figure["finite"]


def test_refused(figure: Any) -> None:
    assert [refused for _, refused in figure] == [True, True]
    assert "1 to 1024" in figure[0][0]
    assert "sampling_mask needs" in figure[1][0]


def test_continued(figure: Any) -> None:
    assert figure["reason"] == "abort"
    assert figure["apart"]
    assert (figure["missing"], figure["old"], figure["new"]) == (0, 0, 0)


def test_updates(figure: Any) -> None:
    assert figure["same"]
    assert [refused for _, refused in figure["said"]] == [True, True]
    for message, _ in figure["said"]:
        assert message.startswith("the mixture ")
        assert "takes no new weights with vLLM's CPU build" in message


def test_garbage(figure: Any) -> None:
    assert min(figure) > APART, "vLLM's CPU build loads mixtures now: drop the refusal"
