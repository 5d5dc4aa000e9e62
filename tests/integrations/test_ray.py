"""A service in a real Ray cluster of three machines, from an environment that has the base package and Ray only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from command_lines import line_of
from documents import blocks
from framework_python import framework_python
from needed import usable

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]
PATIENT = {**os.environ, "RAY_raylet_start_wait_time_s": "120"}
"""A machine that is shared takes longer to start Ray than Ray allows."""
DRIVER = Path(__file__).parents[1] / "ray_driver.py"


@contextmanager
def driver(folder: Path, topology: str) -> Iterator[subprocess.Popen[str]]:
    command = [framework_python("trainers"), "-P", str(DRIVER), sys.executable, topology, str(folder)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env={**PATIENT, "TMPDIR": str(folder), "PYTHONPATH": str(DRIVER.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name:
        yield Path(name)


def remains(folder: Path) -> list[str]:
    """Processes of services in Ray that are left, a while after their driver's end."""

    def of_ray(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return any(f"{folder}/prorl-ray-" in part for part in process.cmdline())
        return False

    _, left = psutil.wait_procs([each for each in psutil.process_iter() if of_ray(each)], timeout=30)
    return [line_of(each) for each in left]


def test_the_demo_trains_while_a_machine_is_lost_and_all_ends_with_the_driver(folder: Path) -> None:
    topology = folder / "topology.toml"
    topology.write_text('[sandbox]\nkind = "process"\n')
    with driver(folder, str(topology)) as process:
        assert process.stdout is not None
        seen = json.loads(next((line for line in process.stdout if line.startswith("{")), "{}"))
        process.kill()
    assert seen, (folder / "log").read_text()[-4000:]
    assert remains(folder) == []
    assert "for 4 nodes with {'CPU': 1}, each on a machine of its own: it has 4 machines, 3 of that" in seen["too_many"]
    assert "--slots judge=1: write ROLE=N" in seen["wrong"]
    assert (seen["machines"], seen["same"], seen["left"]) == (3, 2, 1)
    assert seen["outcomes"] == ["completed"] * (6 * 4 * 8 + 8)
    assert sum(seen["rewards"][-2:]) > sum(seen["rewards"][:2]) + 0.5


def test_the_documents_example(folder: Path) -> None:
    usable("bubblewrap")
    (example,) = [block for block in blocks("python") if "integrations.ray" in block]
    with driver(folder, "") as process:
        out, _ = process.communicate(example, timeout=500)
    assert process.returncode == 0, (folder / "log").read_text()[-4000:]
    said = out.splitlines()
    assert len([line for line in said if line.startswith("ray-")]) == 3
    assert len([line for line in said if line.startswith("completed ")]) == 16
    assert remains(folder) == []
