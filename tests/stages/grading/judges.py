"""Functions that judge, well and badly, for grader processes to import."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CALLS: list[int] = []


def equal(truth: str, answer: str) -> bool:
    return truth == answer


def pid() -> int:
    return os.getpid()


def is_imported(module: str) -> bool:
    return module in sys.modules


def sleep(seconds: float) -> float:
    print("good night", flush=True)
    time.sleep(seconds)
    return 1.0


def spin() -> float:
    while True:
        pass


def leave(path: str) -> float:
    """Start a process that outlives the call, in a session of its own, and note its pid."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(path).write_text(str(child.pid), encoding="ascii")
    return spin()


def divide() -> float:
    print("about to divide", flush=True)
    return 1 / len("")


def crash() -> float:
    print("about to crash", flush=True)
    ctypes.string_at(0)
    return 1.0


def die_the_second_time() -> float:
    CALLS.append(1)
    if len(CALLS) > 1:
        os._exit(3)
    return 1.0


def leave_by_exit() -> float:
    sys.exit(0)


def eat() -> float:
    return float(len(bytearray(1 << 40)))


def chatter() -> float:
    print("x" * (8 << 20))
    return 1.0


def give(what: str) -> Any:
    return {
        "nan": math.nan,
        "infinite in a map": {"reward": math.inf},
        "text": "1.0",
        "nothing": None,
        "object": object(),
        "list": [1.0],
    }[what]
