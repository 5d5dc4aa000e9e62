from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from needed import usable

from prorl_zmq.errors import SandboxFailed, SandboxUnavailable
from prorl_zmq.tools.containers.specification import Bind, SandboxSpec
from prorl_zmq.tools.kinds import bubblewrap
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
def test_an_images_directory_is_its_root(sandboxes: Sandboxes, root_filesystem: Path) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one", SandboxSpec(image=str(root_filesystem)))
        result = await sandbox.exec(["sh", "-c", "cat /etc/debian_version; ls -d /var /workspace; whoami; pwd"], 60)
        expected = (root_filesystem / "etc" / "debian_version").read_bytes() + b"/var\n/workspace\nagent\n/workspace\n"
        assert result.stdout == expected
        await sandbox.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
def test_something_is_bound_in_a_folder_that_the_image_has(
    sandboxes: Sandboxes, root_filesystem: Path, tmp_path: Path
) -> None:
    """A harness lies in its user's home, say, and an image may have that home too."""
    (tmp_path / "bound").mkdir()
    (tmp_path / "bound" / "file").write_text("it is there\n")
    binds = tuple(Bind(str(tmp_path / "bound"), target) for target in ("/usr/share/new/deep", "/root/new", "/mnt"))

    async def main() -> None:
        sandbox = await sandboxes.create("one", SandboxSpec(image=str(root_filesystem), binds=binds))
        places = " ".join(f"{bind.target}/file" for bind in binds)
        result = await sandbox.exec(
            ["sh", "-c", f"cat {places}; cd /usr/share; ls -d zoneinfo; touch /usr/x new/x"], 60
        )
        assert result.stdout == b"it is there\n" * 3 + b"zoneinfo\n"
        assert result.stderr.count(b"Read-only file system") == 2
        await sandbox.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
@pytest.mark.parametrize("spec", [SandboxSpec(fakeroot=True), SandboxSpec(writable="disk")])
def test_what_it_cannot_do_is_said(sandboxes: Sandboxes, spec: SandboxSpec) -> None:
    async def main() -> None:
        with pytest.raises(SandboxFailed, match="--sandbox apptainer"):
            await sandboxes.create("one", spec)

    asyncio.run(main())


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


@pytest.mark.parametrize("times", [30, pytest.param(150, marks=pytest.mark.proof)])
@pytest.mark.parametrize("whom", ["server", "runtime"])
def test_a_start_that_is_killed_half_way_leaves_no_process(tmp_path: Path, whom: str, times: int) -> None:
    """A bubblewrap that was killed in its first moments left a child that waited for it for ever."""
    usable("bubblewrap")
    command = [sys.executable, "-P", str(Path(__file__).with_name("killed_starts.py")), str(tmp_path), whom, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "0\n", done.stderr
