"""Whether rollouts and learning overlap in the real training, `prorl_zmq.examples.train_torch`: for bench/dapo.py.

The example runs as a user would run it: its service, its engine, a transformer that learns. It times its steps, all but
the first two, while rollouts of the next batch run beside the learning; after that, each side alone: batches of
rollouts with no learning, and learning from the last batches again with the service down. A step should take no longer
than the longer of the two. Here they share the machine's cores; in earnest each has GPUs of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import msgspec

STEPS = 14
MEASURED = 4
"""Batches with which each side is timed alone."""
LIMIT_S = 1200.0


class Overlap(msgspec.Struct, frozen=True):
    """What the example says of its steps, in seconds each (see its records.py)."""

    steps: int
    step_s: float
    rollout_alone_s: float
    learn_alone_s: float
    ratio: float
    """A step, to the longer of the two."""
    serial_ratio: float
    """Both, to the longer of the two."""


class _Summary(msgspec.Struct, frozen=True):
    overlap: Overlap | None = None


def lacking() -> str:
    """Say why the example cannot run here; empty: it can."""
    return "" if find_spec("torch") else "no training without torch: install the extra [train]"


def train() -> Overlap:
    """Run the example.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        flags = ["--out", folder, "--steps", str(STEPS), "--eval-every", "0", "--measure", str(MEASURED)]
        command = [sys.executable, "-P", "-m", "prorl_zmq.examples.train_torch", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"the example ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        overlap = msgspec.json.decode((Path(folder) / "summary.json").read_bytes(), type=_Summary).overlap
    if overlap is None:
        raise RuntimeError(f"the example made too few steps to time them:\n{done.stdout[-2000:]}")
    return overlap
