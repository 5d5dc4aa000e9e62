"""A Python with vLLM, which cannot live in this one's environment: where it is, and how it sees the code under test."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path

from needed import lacking

import prorl_zmq
from prorl_zmq.examples.trainers.shared import make_model

HERE = Path(__file__).parent
START_LIMIT_S = 240.0
"""Longest start of a real engine, on a machine that may be busy."""


def vllm_python() -> str:
    """Give the interpreter, or skip the test."""
    named = os.environ.get("PRORL_VLLM_PYTHON", "")
    beside = HERE.parent / ".vllm" / "bin" / "python"
    if not named and not beside.is_file():
        lacking("vllm", "no vLLM: neither PRORL_VLLM_PYTHON names a Python that has it nor is there .vllm/bin/python")
    return named or str(beside)


def environment(folder: Path) -> dict[str, str]:
    """Give an environment in which that interpreter imports the package under test, and none of our other packages.

    Args:
        folder: where to put what its PYTHONPATH names.
    """
    place = folder / "packages"
    if not place.is_dir():
        place.mkdir(parents=True)
        (place / "prorl_zmq").symlink_to(Path(prorl_zmq.__file__).parent)
        # With what is installed comes the entry point that vLLM calls in its processes.
        installed = next(
            file for file in importlib.metadata.files("prorl_zmq") or () if file.name == "entry_points.txt"
        )
        described = Path(str(installed.locate())).parent
        (place / described.name).symlink_to(described)
    return {**os.environ, "PYTHONPATH": str(place)}


def transfer_environment(folder: Path) -> dict[str, str]:
    """Give `environment` with a weight transfer for CPUs, which vLLM finds by its entry point (`socket_transfer`)."""
    given = environment(folder)
    described = folder / "packages" / "socket_transfer-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: socket-transfer\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\nsocket = socket_transfer:register\n")
    module = HERE / "inference" / "vllm" / "socket_transfer.py"
    (folder / "packages" / module.name).symlink_to(module)
    return given


def tiny_models(folder: Path, count: int) -> list[Path]:
    """Make folders with tiny models that differ in their weights; 8 s."""
    folders = [folder / f"tiny-{number}" for number in range(count)]
    command = [vllm_python(), make_model.__file__, "--raw", *map(str, folders)]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=START_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return folders
