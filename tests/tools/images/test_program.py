from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import SandboxFailed
from prorl_zmq.tools.images.guard import root_lacks_capabilities
from prorl_zmq.tools.images.program import LINE_LIMIT, run_program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("logging_kept")


def run(folder: Path, script: str, timeout_s: float = 30, **more: object) -> list[str]:
    lines: list[str] = []
    run_program(
        ["bash", "-c", script],
        folder=folder,
        environment=dict(os.environ),
        timeout_s=timeout_s,
        heard=lines.append,
        **more,  # type: ignore[arg-type]
    )
    return lines


def test_a_guard_imports_little() -> None:
    """Each program of a build starts one, and asyncio takes longer to import than all that it needs."""
    imported = f"import sys, {run_program.__module__.rpartition('.')[0]}.guard; print('asyncio' in sys.modules)"
    said = subprocess.run([sys.executable, "-P", "-c", imported], check=True, capture_output=True, text=True)
    assert said.stdout == "False\n"


def test_lines_are_heard(tmp_path: Path) -> None:
    script = r"""printf 'one\n\ntwo\rthree'; printf '\e[31mred\e[0m \xff\a\n' >&2; pwd; cat; printf end"""
    assert run(tmp_path, script) == ["one", "two", "threered \ufffd", str(tmp_path), "end"]


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    (line,) = run(tmp_path, "head -c 10000000 /dev/zero | tr '\\0' x")
    assert line == "x" * LINE_LIMIT


def test_a_failure_has_the_last_words(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match="bash failed with exit code 7: it broke") as caught:
        run(tmp_path, "echo 'INFO:    chatter'; echo it broke; exit 7")
    assert caught.value.exit_code == 7
    with pytest.raises(SandboxFailed, match="exit code 137; it said nothing"):
        run(tmp_path, "kill -9 $$")
    with pytest.raises(SandboxFailed, match="/nowhere does not start: No such file"):
        run_program(["/nowhere"], folder=tmp_path, environment=dict(os.environ), timeout_s=9, heard=print)


def test_nothing_outlives_it(tmp_path: Path, survivors: Callable[[str], list[str]]) -> None:
    """Neither what it left in the background with its output open, nor what has a session of its own."""
    run(tmp_path, "sleep 86421 & setsid sleep 86421 & (setsid sleep 86421 & disown) & echo done")
    assert survivors("sleep 86421") == []
    with pytest.raises(SandboxFailed, match="took longer than 1 s"):
        run(tmp_path, "trap '' TERM INT; setsid sleep 86421 & sleep 86421", timeout_s=1)
    assert survivors("sleep 86421") == []


def test_a_killed_guard_takes_the_program_along(tmp_path: Path, survivors: Callable[[str], list[str]]) -> None:
    with pytest.raises(SandboxFailed, match="exit code -9"):
        run(tmp_path, f"kill -{int(signal.SIGKILL)} $PPID; sleep 86422", timeout_s=60)
    assert survivors("sleep 86422") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount in a mount namespace of its own")
def test_mounts_stay_in_the_programs_own_namespace(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    run(tmp_path, "mount -t tmpfs none here && touch here/inside && ls here", namespaces="mount")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can map all users into a namespace")
def test_root_of_a_user_namespace_has_all_capabilities_and_all_users(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ask = "from prorl_zmq.tools.images.guard import *; print(root_lacks_capabilities())"
    script = f"chown 42:43 file && {sys.executable} -P -c '{ask}'"
    assert run(tmp_path, script, namespaces="user") == ["False"]
    assert ((tmp_path / "file").stat().st_uid, (tmp_path / "file").stat().st_gid) == (42, 43)
    assert run(tmp_path, f"{sys.executable} -P -c '{ask}'") == [str(root_lacks_capabilities())]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root contains programs so")
def test_nothing_outlives_a_contained_program(
    tiny: Path, tmp_path: Path, survivors: Callable[[str], list[str]]
) -> None:
    inputs = tmp_path / "inputs"
    (inputs / "old").mkdir(parents=True)
    (tiny / ".prorl").mkdir()

    def contained(script: str, timeout_s: float = 30) -> None:
        run_program(
            ["/bin/sh", "-c", script],
            folder=tmp_path,
            environment=dict(os.environ),
            timeout_s=timeout_s,
            heard=print,
            namespaces="contained",
            mounts={"/": tiny, "/.prorl": inputs},
        )

    contained("sleep 86423 & (trap '' TERM; sleep 86423) & test ! -e /.prorl/old/etc")
    assert survivors("sleep 86423") == []
    with pytest.raises(SandboxFailed, match="took longer than 1 s"):
        contained("trap '' TERM INT; sleep 86423 & sleep 86423", 1)
    assert survivors("sleep 86423") == []
    with pytest.raises(SandboxFailed, match="sh failed with exit code 3: it broke"):
        contained("echo it broke; exit 3")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has such namespaces")
def test_a_machine_without_user_namespaces_is_named(tmp_path: Path) -> None:
    guard = f"{sys.executable} -P -m {run_program.__module__.rpartition('.')[0]}.guard contained /={tmp_path} -- true"
    with pytest.raises(SandboxFailed, match=r"no namespaces for true: .*; allow user namespaces to root"):
        run(tmp_path, f"echo 0 > /proc/sys/user/max_user_namespaces && tail -f /dev/null | {guard}", namespaces="user")
