"""Root causes in what vLLM 0.32 wrote on a CPU, its paths shortened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prorl_zmq.inference.vllm.root_cause import LIMIT, root_cause

LOGS = Path(__file__).with_name("vllm_logs")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "kv_cache_too_large",
            (
                "Available memory on node 0 (13.74/18.46 GiB) on kv cache allocation is less than requested memory for kv "  # noqa: E501 - what vLLM wrote
                "(93132.26 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by "  # noqa: E501 - what vLLM wrote
                "other processes."
            ),
        ),
        (
            "no_room_for_cache",
            (
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "  # noqa: E501 - what vLLM wrote
                "engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). See "
                "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
            ),
        ),
        (
            "worker_failed",
            (
                "aot_compile is not supported by the current configuration. Please make sure torch.compile is enabled "
                "with the latest version of PyTorch (current using torch: 2.13.0+cpu)"
            ),
        ),
    ],
)
def test_the_cause_is_what_the_first_process_said(log: str, cause: str) -> None:
    text = (LOGS / f"{log}.txt").read_text()
    wrapper = (
        "Traceback (most recent call last):\nRuntimeError: Engine core initialization failed. See root cause above."
    )
    assert root_cause(f"{text}\n{wrapper}") == cause


def traceback_of(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise ValueError('no such model')", "no such model"),
        ("{}['key']", "KeyError: 'key'"),
        ("import asyncio; raise asyncio.CancelledError", ""),
        ("raise RuntimeError('first line\\nsecond line')", "first line second line"),
        ("raise OSError('x' * 1000 + ' y')", "x" * LIMIT),
        # What a program makes of an error while handling it is what it has to say.
        ("try: {}['k']\nexcept KeyError: raise ValueError('k is not configured')", "k is not configured"),
        (
            "try: {}['k']\nexcept KeyError as e: raise ValueError('set k: it has no default') from e",
            "set k: it has no default",
        ),
    ],
)
def test_pythons_tracebacks(code: str, cause: str) -> None:
    assert root_cause(traceback_of(code)) == cause


def test_a_wrong_setting_in_pydantics_words() -> None:
    text = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (100000000) is greater than the derived max_model_len. "
        "[type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error\n"
    )
    assert root_cause(text) == "User-specified max_model_len (100000000) is greater than the derived max_model_len."


def test_warnings_and_text_without_an_exception_are_no_cause() -> None:
    assert root_cause("") == ""
    assert root_cause("(EngineCore pid=9) WARNING 11-23 05:43:15 [a.py:1] ImportError: no flash_attn\nloading\n") == ""
