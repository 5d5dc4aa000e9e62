from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import SandboxFailed, SandboxUnavailable
from prorl_zmq.tools.sandbox import bubblewrap
from prorl_zmq.tools.sandbox.bubblewrap import bubblewrap_problem
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.tools.sandbox.execution import ExecResult

needs_bubblewrap = pytest.mark.skipif(bubblewrap_problem() is not None, reason=str(bubblewrap_problem()))


def run_inside(root: Path, script: str) -> ExecResult:
    async def main() -> ExecResult:
        sandbox = await Sandboxes("bubblewrap", root).create("one")
        try:
            return await sandbox.run(["bash", "-c", script], 20)
        finally:
            await sandbox.close()

    return asyncio.run(main())


@needs_bubblewrap
def test_nothing_of_the_host_is_inside(tmp_path: Path) -> None:
    (tmp_path / "host").write_text("secret")
    result = run_inside(
        tmp_path / "root",
        f"cat {tmp_path}/host; ls /; ls /tmp /etc; whoami; id -u; hostname; cat /proc/[0-9]*/comm | sort -u",
    )
    words = result.stdout.decode().split()
    assert "secret" not in words
    assert not {"root", "home", "var", "sys", "run", "work"} & set(words)
    assert {"agent", "1000", "sandbox", "bwrap", "bash", "cat"} <= set(words)


@needs_bubblewrap
def test_there_is_no_network(tmp_path: Path) -> None:
    result = run_inside(tmp_path, "tail -n +3 /proc/net/dev; exec 3<>/dev/tcp/1.1.1.1/53")
    assert result.stdout.split()[0] == b"lo:"
    assert len(result.stdout.splitlines()) == 1
    assert b"Network is unreachable" in result.stderr


@needs_bubblewrap
def test_nothing_of_the_system_is_writable_even_for_a_service_of_root(tmp_path: Path) -> None:
    """Once /proc/sys/kernel/core_pattern was: a way to run programs on the host. Asked here, never written."""
    result = run_inside(
        tmp_path,
        "find /proc/sys /proc/irq /proc/bus /proc/sysrq-trigger /usr /etc -type f -writable; "
        "grep -i '^Cap[EPB]' /proc/self/status",
    )
    lines = result.stdout.decode().splitlines()
    assert [line.split()[1] for line in lines] == ["0" * 16] * 3


@needs_bubblewrap
def test_a_single_process_has_limits(tmp_path: Path) -> None:
    result = run_inside(tmp_path, "ulimit -v; ulimit -f; ulimit -u; ulimit -c")
    if os.access(bubblewrap.LIMITER, os.X_OK):
        assert result.stdout.split() == [b"4194304", b"1048576", b"512", b"0"]


@needs_bubblewrap
def test_a_sandbox_that_does_not_start_is_not_a_failed_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap exits with 1 then, as a check script does that says no."""
    monkeypatch.setattr(bubblewrap, "_fixed_arguments", lambda: ("--ro-bind", "/nowhere-at-all", "/usr"))
    with pytest.raises(SandboxFailed, match=r"could not start a command: .*nowhere-at-all"):
        run_inside(tmp_path, "true")


def test_a_machine_without_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"install the Debian package bubblewrap, or .* --sandbox process"):
        Sandboxes("bubblewrap", tmp_path).check()
    Sandboxes("process", tmp_path).check()


def test_a_machine_that_refuses_namespaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "PROGRAM", str(program))
    with pytest.raises(SandboxUnavailable, match=r"refuses user namespaces .*unprivileged_userns") as caught:
        Sandboxes("bubblewrap", tmp_path).check()
    assert caught.value.kind == "bubblewrap"
