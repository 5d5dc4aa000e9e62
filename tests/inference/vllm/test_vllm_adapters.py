"""Adapters in a real vLLM: what one run of `adapter_cases.py` gave, against peft's own forward pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.adapters import PeftReference, peft_adapter
from vllm_python import START_LIMIT_S, vllm_python

from prorl_zmq.inference.adapters import CONFIG, WEIGHTS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2 * START_LIMIT_S + 60),
    pytest.mark.xdist_group("transformers"),
]
CALLS = int(os.environ.get("PRORL_ADAPTER_CALLS", "300"))
CLOSE = 1e-4
"""Most that a log-prob may differ from peft's, in float32."""
APART = 1.0
"""Least that some log-prob of an answer differs from that of any other adapter, and of the base."""


@pytest.fixture(scope="module")
def adapters(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten adapters, the next version of the first, and wrong ones."""
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(10):
        peft_adapter(models[0], folder / f"a{number}", number)
    peft_adapter(models[0], folder / "a0-next", 100)
    peft_adapter(models[0], folder / "rank16", 101, rank=16)
    for name in ("torn", "nan", "bias", "other-base"):
        shutil.copytree(folder / "a0", folder / name)
    whole = (folder / "torn" / WEIGHTS).read_bytes()
    (folder / "torn" / WEIGHTS).write_bytes(whole[:-100])
    tensors = load_file(folder / "nan" / WEIGHTS)
    name = min(tensors)
    save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, folder / "nan" / WEIGHTS)
    wider = np.pad(tensors[name], ((0, 0), (0, 4)))
    save_file({**tensors, name: wider}, folder / "other-base" / WEIGHTS)
    config = json.loads((folder / "bias" / CONFIG).read_text())
    (folder / "bias" / CONFIG).write_text(json.dumps({**config, "bias": "all"}))
    return folder


@pytest.fixture(scope="module")
def results(
    models: list[Path], adapters: Path, vllm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapter-cases")
    given, out = folder / "given", folder / "results.json"
    shutil.copytree(adapters, given)
    arguments = [models[0], given, folder / "copies", out, str(CALLS)]
    with (folder / "log").open("w+b") as log:
        code = subprocess.run(
            [vllm_python(), Path(__file__).parent / "adapter_cases.py", *arguments],
            env=vllm_environment,
            stdout=log,
            stderr=log,
            timeout=2 * START_LIMIT_S,
        ).returncode
        log.seek(0)
        written = log.read().decode(errors="replace")
    assert code == 0, written[-8000:]
    return json.loads(out.read_text())


def folder_of(adapters: Path, model: str | None, version: int) -> Path | None:
    if model is None:
        assert version == 0
        return None
    if version == 12:
        return adapters / "a0-next"
    assert version == int(model[1:]) + 1
    return adapters / model


def errors(reference: PeftReference, adapters: Path, answers: list[Any]) -> tuple[float, float]:
    """Return the largest error against the answers' own adapters, and the least largest error against any other."""
    by_folder: dict[Path | None, list[Any]] = defaultdict(list)
    for one in answers:
        ((version, start, end),) = one["spans"]
        assert (start, end) == (0, len(one["ids"]))
        by_folder[folder_of(adapters, one["model"], version)].append(one)
    worst, nearest = 0.0, float("inf")
    everything = {None, adapters / "a0-next", *(adapters / f"a{number}" for number in range(10))}
    for folder, ones in by_folder.items():
        sequences = [[*one["prompt"], *one["ids"]] for one in ones]
        given = np.array([one["logprobs"] for one in ones])
        for other in everything:
            distances = np.abs(reference.logprobs(other, sequences, given.shape[1]) - given).max(1)
            if other == folder:
                worst = max(worst, float(distances.max()))
            else:
                nearest = min(nearest, float(distances.min()))
    return worst, nearest


def test_no_call_is_answered_by_another_adapter(results: Any, models: list[Path], adapters: Path) -> None:
    mixed = results["mixed"]
    assert len({one["model"] for one in mixed}) == 11
    assert results["slots"] == 4
    worst, nearest = errors(PeftReference(models[0]), adapters, mixed)
    print(f"{len(mixed)} calls in {results['mixed_s']:.1f} s: worst {worst:.1e}, nearest other {nearest:.2f}")
    assert worst < CLOSE
    assert nearest > APART


def test_no_text_is_scored_by_another_adapter(results: Any, models: list[Path], adapters: Path) -> None:
    worst, nearest = errors(PeftReference(models[0]), adapters, results["scored"])
    print(f"{len(results['scored'])} texts scored: worst {worst:.1e}, nearest other {nearest:.2f}")
    assert worst < CLOSE
    assert nearest > APART


def test_a_version_loaded_while_another_generates(results: Any, models: list[Path], adapters: Path) -> None:
    """Each token is of its version's weights, and no prefix of one version is found by the other."""
    replaced = results["replaced"]
    assert replaced["meanwhile"] == 16
    assert {one["spans"][0][0] for one in replaced["old"]} == {1}
    assert {one["spans"][0][0] for one in replaced["new"]} == {12}
    assert [one["cached"] for one in replaced["new"]] == [0] * 16
    assert replaced["again"]["cached"] > 0
    worst, nearest = errors(PeftReference(models[0]), adapters, [*replaced["old"], *replaced["new"]])
    print(f"loaded in {replaced['loaded_s']:.2f} s beside 16 generations: worst {worst:.1e}, {nearest:.2f}")
    assert worst < CLOSE
    assert nearest > APART


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "no adapter that this host can read"),
        ("torn", "not a whole safetensors file"),
        ("rank16", "its rank is 16; this engine takes adapters up to 8"),
        ("other-base", "is it of this base?"),
        ("nan", "holds NaN"),
        ("bias", 'its bias is "all"'),
    ],
)
def test_a_wrong_adapter_is_refused_by_name(results: Any, name: str, words: str) -> None:
    refusal = results["refused"]["wrong"][name]
    assert refusal["type"] == "InvalidWeights"
    assert words in refusal["message"]
    assert refusal["fields"]["path"].endswith(f"/given/{name}")
    assert f"/given/{name}" in refusal["message"]


def test_the_base_never_answers_for_an_adapter(results: Any, models: list[Path], adapters: Path) -> None:
    for refusal in results["refused"]["unknown"]:
        assert refusal["type"] == "EngineFailed"
        assert "not loaded" in refusal["message"]
        assert refusal["fields"]["not_loaded"] is True
    worst, nearest = errors(PeftReference(models[0]), adapters, [results["refused"]["after"]])
    assert worst < CLOSE
    assert nearest > APART


def test_retired_versions_leave_nothing(results: Any) -> None:
    assert results["left"] == 0
    assert results["listed"] == []
