"""Builders that are killed at every step, or told to end: the name has the old image, the new one or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.tools.images.kept_folder import locked

from .conftest import CLI, leftovers, needs_apptainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.tools.images.image_store import ImageStore

STEPS = frozenset({"os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "subprocess.Popen"})
SLEEP = f"sleep {80_000_000 + os.getpid()}"  # one of its own for each worker of pytest


def build_and_die(store: ImageStore, source: Path, step: int) -> bool:
    """Build in a process that kills itself before its given step; give whether it died."""
    pid = os.fork()
    if pid == 0:
        left = step

        def on_event(event: str, _: object) -> None:
            nonlocal left
            if event in STEPS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(on_event)
            store.build(str(source), "tiny", mode="scratch", heard=print)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def word(store: ImageStore) -> str | None:
    """The word in the image of the name, which must be whole; None without one."""
    link = store.root / "tiny"
    image = store.find("tiny")
    assert (image is not None) == link.is_symlink()
    if image is None:
        return None
    assert {"bash", "sh", "true"} <= {each.name for each in (image.path / "bin").iterdir()}
    return (image.path / "etc" / "word").read_text()


@pytest.mark.proof
@pytest.mark.parametrize("old", [None, "old"])
def test_killed_before_each_step(
    old: str | None,
    store: ImageStore,
    tiny: Path,
    survivors: Callable[[str], list[str]],
    request: pytest.FixtureRequest,
) -> None:
    if old is not None:
        request.getfixturevalue("few_programs")  # once with Apptainer, once without, which is quicker
    file = tiny / "etc" / "word"
    for step in count(1):
        if old is not None:
            file.write_text("old")
            store.build(str(tiny), "tiny")
        elif (store.root / "tiny").is_symlink():
            store.remove("tiny")
        file.write_text("new")
        died = build_and_die(store, tiny, step)
        assert word(store) in ({old, "new"} if died else {"new"})
        assert survivors(str(store.root)) == []
        file.write_text("next")
        store.build(str(tiny), "tiny")
        assert word(store) == "next"
        assert leftovers(store, "tiny") == set()
        if not died:
            break
    assert step > 8


@needs_apptainer
@pytest.mark.few(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_stopped_while_a_program_works(
    number: signal.Signals, store: ImageStore, tiny: Path, tmp_path: Path, survivors: Callable[[str], list[str]]
) -> None:
    (tmp_path / "a.def").write_text(f"Bootstrap: localimage\nFrom: ./tiny\n%post\n  {SLEEP}\n")
    command = [*CLI, "build", str(tmp_path / "a.def"), "--name", "a", "--images", str(store.root), "--verbose"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as builder, closing(builder.stderr):  # type: ignore[type-var]
        assert builder.stderr is not None
        said = []
        for line in builder.stderr:
            said.append(line)
            if SLEEP in line:
                break
        builder.send_signal(number)
        code = builder.wait(30)
    assert code == (-number if number == signal.SIGKILL else 130), said
    assert survivors(SLEEP) == []
    assert store.find("a") is None
    if number != signal.SIGKILL:
        assert leftovers(store, "a") == set()
    else:
        with locked(store.root / ".a", wait_s=10, say=said.append) as folder:
            folder.clear()
        assert leftovers(store, "a") == set()


def test_builders_at_one_time_build_once(store: ImageStore, tiny: Path) -> None:
    store.root.mkdir(0o700)
    command = [*CLI, "build", str(tiny), "--name", "tiny", "--images", str(store.root), "--mode", "scratch"]
    with locked(store.root / ".tiny", wait_s=10, say=print):
        builders = [
            subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
        ]
        for builder in builders:
            assert builder.stderr is not None
            assert f"process {os.getpid()} builds it at the moment; waiting" in builder.stderr.readline()
    ends = [builder.communicate(timeout=60) for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * 3
    assert sorted(err.split()[0] for _, err in ends) == ["building", "using", "using"]
    assert {out for out, _ in ends} == {f"{store.root}/tiny\n"}
    assert all("another process built it just now" in err for _, err in ends if err.startswith("using"))
