"""The numbers of a machine that the test makes up, and those of this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from prorl_zmq.system import free_memory as module
from prorl_zmq.system.free_memory import free_memory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 KiB, 800 of them free."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  800 kB\n")
    monkeypatch.setattr(module, "PROC", tmp_path / "proc")
    monkeypatch.setattr(module, "GROUPS", tmp_path / "groups")
    return tmp_path


def group(machine: Path, path: str, limit: str, used: int, idle: int, *, version: int = 2) -> None:
    folder = machine / "groups" / path
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'' if version == 2 else 'total_'}inactive_file {idle}\n")


def test_a_machine_without_groups(machine: Path) -> None:
    assert free_memory() == (800 * 1024, 1000 * 1024)
    (machine / "proc" / "meminfo").unlink()
    assert free_memory() == (0, 0)


def test_the_narrowest_of_the_groups_above_counts_and_idle_files_are_free(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("0::/job/step\n")
    group(machine, "job/step", "max", 300_000, 0)
    group(machine, "job", "400000", 350_000, 100_000)
    assert free_memory() == (150_000, 400_000)


def test_groups_of_the_first_version(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("5:cpu,cpuacct:/other\n4:memory:/job\n")
    group(machine, "memory/job", "400000", 500_000, 0, version=1)
    assert free_memory() == (0, 400_000)


def test_this_machine() -> None:
    free, total = free_memory()
    assert 0 < free < total <= psutil.virtual_memory().total
