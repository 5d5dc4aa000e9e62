"""An engine host's hard end, and starts that fail, with a real vLLM."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_python import START_LIMIT_S, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(START_LIMIT_S + 60)]

END_S = 30.0
"""Longest that vLLM's processes may outlive their host, on a busy machine."""


@pytest.fixture(scope="module")
def ended(
    models: list[Path], vllm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `lives.py` said before it was killed, and which of vLLM's processes lived on."""
    reading, writing = os.pipe()
    with (tmp_path_factory.mktemp("end") / "log").open("w+b") as log:
        host = subprocess.Popen(
            [vllm_python(), Path(__file__).parent / "lives.py", models[0]],
            env=vllm_environment | {"ANSWER": str(writing)},
            stdout=log,
            stderr=log,
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            assert select.select([reading], [], [], START_LIMIT_S)[0], "vLLM did not start in time"
            with os.fdopen(reading, "rb") as answer:
                said = answer.read1()
            if not said:
                host.wait(END_S)
                log.seek(0)
                pytest.fail(log.read().decode(errors="replace")[-8000:])
            given = json.loads(said)
            processes = [os.pidfd_open(pid) for pid in given["pids"]]
        finally:
            host.send_signal(signal.SIGKILL)
            host.wait(END_S)
    given["left"] = [pid for pid, process in zip(given["pids"], processes, strict=True) if not _over(process)]
    return given


def _over(process: int) -> bool:
    over = bool(select.select([process], [], [], END_S)[0])
    if not over:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)
    return over


def test_killed_host_leaves_no_process_of_vllm(ended: dict[str, Any]) -> None:
    assert len(ended["pids"]) >= 2
    assert ended["left"] == []


def test_flags_that_vllm_does_not_take(ended: dict[str, Any]) -> None:
    unknown, malformed, meaning, impossible = ended["failures"]
    assert unknown[0] == malformed[0] == meaning[0] == "ConfigError"
    assert "--no-such-flag" in unknown[1]
    assert "many" in malformed[1]
    assert "raw_logits" in meaning[1]
    assert impossible[0] == "EngineFailed"
    assert "100000000" in impossible[1]
