"""The index of a prefix cache and a real vLLM agree."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_python import START_LIMIT_S, vllm_python

HERE = Path(__file__).parent

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def indexed(models: list[Path], vllm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `kv_event_cases.py` wrote."""
    out = tmp_path_factory.mktemp("kv_events") / "results.json"
    command = [vllm_python(), HERE / "kv_event_cases.py", *models, out]
    done = subprocess.run(
        command, env=vllm_environment, capture_output=True, text=True, errors="replace", timeout=START_LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(out.read_text())


def test_resident_tokens_are_what_the_next_turn_finds_cached(indexed: Any) -> None:
    turns = [(job, known, cached) for job, known, cached in indexed["turns"] if known is not None]
    assert [known for _, known, _ in turns] == [cached for _, _, cached in turns]
    assert any(cached for _, _, cached in turns)
    assert turns[2][0] == "a"
    assert 96 <= turns[2][1] < 224, "a long context displaced what it did not share of 229 tokens"
    assert "b" in indexed["listed"]


def test_new_weights_leave_nothing(indexed: Any) -> None:
    """The second index learns all from the engine's own events, which it asks for."""
    assert indexed["cleared"]["b"] == indexed["cleared"]["c"] == 96, "what `a` shares, and has computed since"
    assert indexed["cleared"]["a"] > 192
    assert indexed["turns"][-1] == ["a", 0, 0]


def test_only_the_host_reads_the_events(indexed: Any) -> None:
    assert indexed["mode"] == 0o700
    assert not indexed["left"]


def test_what_excludes_events_is_refused_by_name(indexed: Any) -> None:
    reasons = ["a flag turns off", "--data-parallel-size", "--kv-events-config"]
    for refused, reason in zip(indexed["refused"], reasons, strict=True):
        assert refused["type"] == "ConfigError"
        assert refused["fields"]["key"] == "kv_events"
        assert reason in refused["message"]
