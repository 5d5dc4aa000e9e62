"""One run of a real vLLM, whose results the tests of this folder judge."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_python import START_LIMIT_S, environment, tiny_models, vllm_python

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny models that differ in their weights."""
    return tiny_models(tmp_path_factory.mktemp("models"), 2)


@pytest.fixture(scope="session")
def vllm_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    vllm_python()
    return environment(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def results(
    models: list[Path], vllm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `cases.py` wrote."""
    folder = tmp_path_factory.mktemp("cases")
    out = folder / "results.json"
    with (folder / "log").open("w+b") as log:
        code = subprocess.run(
            [vllm_python(), HERE / "cases.py", *models, out],
            env=vllm_environment,
            stdout=log,
            stderr=log,
            timeout=START_LIMIT_S,
        ).returncode
        log.seek(0)
        written = log.read().decode(errors="replace")
    assert code == 0, written[-8000:]
    return {**json.loads(out.read_text()), "log": written}
