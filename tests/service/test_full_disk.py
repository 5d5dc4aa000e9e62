"""An agent that fills the disk on which the run folder lies: it is ended, it earns 0, and all others go on."""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rootfs import root_filesystem

from prorl_zmq import EpisodeLimits, Job

from . import test_saboteurs
from .test_saboteurs import EDIT, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.proof

DISK = "96m"
FILL = "cat /dev/zero > /workspace/full; cat /dev/zero > /tmp/full; echo here; sleep 3"
MANY = "mkdir /workspace/many; cd /workspace/many; for each in $(seq 200000); do : > $each || break; done; sleep 3"


@pytest.fixture
def small_disk(tmp_path: Path, sandbox_kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made, but for `tmp_path`."""
    del tmp_path
    if sandbox_kind == "apptainer":
        monkeypatch.setattr(test_saboteurs, "root_filesystem", partial(Path, root_filesystem()))
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK},nr_inodes=20000", "none", folder]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("this root cannot mount file systems")
        monkeypatch.setattr(tempfile, "tempdir", folder)
        try:
            yield Path(folder)
        finally:
            monkeypatch.undo()
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("fill", [FILL, MANY], ids=["bytes", "inodes"])
@pytest.mark.parametrize("sandbox_kind", ["bubblewrap", "apptainer"], indirect=True)
def test_who_fills_the_disk_is_ended_and_all_others_go_on(
    sandbox_kind: str, fill: str, small_disk: Path, tmp_path: Path
) -> None:
    """RUN's end could not be written, EVAL did not start, the sandbox was kept, and other jobs waited for ever."""
    del small_disk
    speeches = {"fill:": [fill, "echo here", EDIT], "honest:": ["sleep 2; until echo 42 > answer; do sleep 0.2; done"]}
    jobs = [
        Job(
            task="shell",
            job_id=f"{name}-{number}",
            instance={"instruction": f"{name}: write 42 to answer.", "check": '[ "$(cat answer)" = 42 ]'},
            episode=EpisodeLimits(tool_call_s=60.0),
        )
        for name, count in (("fill", 2), ("honest", 6))
        for number in range(count)
    ]
    logs = tmp_path / "service"
    logs.mkdir()
    with serving(logs, sandbox_kind, tmp_path, speeches) as client:
        client.submit(jobs)
        done = {each.job_id: each for each in client.stream(timeout_s=100)}
        client.submit(Job(task="shell", job_id="after", instance=jobs[-1].instance))
        (after,) = client.stream(timeout_s=60)
    for name, one in done.items():
        assert one.reward == (1.0 if name.startswith("honest") else 0.0), (name, one.error)
    errors = {each.error.code: each.error.fields.get("limit") for each in done.values() if each.error is not None}
    assert errors == {"sandbox_limit_exceeded": "disk_bytes"}
    assert str(after.outcome) == "completed"
