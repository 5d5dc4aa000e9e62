from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import SandboxUnavailable
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("kind", ["apptainer"], indirect=True)
def test_a_sif_file_is_an_image(sandboxes: Sandboxes, sif: str, survivors: Callable[[str], list[str]]) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one", SandboxSpec(image=sif, writable="disk", fakeroot=True))
        bash = await sandbox.bash()
        assert (await bash.run("echo 1 > /usr/bin/new; cat /usr/bin/new /etc/word", 60)).exit_code == 0
        await sandbox.close()

    asyncio.run(main())
    assert survivors(str(sandboxes.root)) == []
    assert survivors(sif) == []  # nor what served its filesystem


@pytest.mark.parametrize("kind", ["apptainer"], indirect=True)
def test_the_images_own_variables_are_kept(sandboxes: Sandboxes, small_image: Path) -> None:
    environment = small_image / ".singularity.d" / "env"
    environment.mkdir(parents=True)
    (environment / "90-environment.sh").write_text("#!/bin/sh\nexport PATH=/opt/own:$PATH OWN=1\n")
    (environment / "90-environment.sh").chmod(0o755)

    async def main() -> None:
        sandbox = await sandboxes.create("one", SandboxSpec(image=str(small_image)))
        result = await sandbox.exec(["bash", "-c", "echo $PATH $OWN $HOME $TERM; export -p"], 60)
        first, *rest = result.stdout.decode().splitlines()
        assert first.startswith("/opt/own:")
        assert first.endswith(" 1 /workspace dumb")
        assert not any(("APPTAINER" in line or "SINGULARITY" in line) for line in rest)
        await sandbox.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["apptainer"], indirect=True)
def test_localhost_has_an_address(sandboxes: Sandboxes, small_image: Path) -> None:
    (small_image / "etc" / "hosts").write_text("")
    look = ["bash", "-c", ": < /dev/tcp/localhost/9; cat /etc/hosts"]

    async def main() -> None:
        for writable in ("no", "disk"):
            spec = SandboxSpec(image=str(small_image), writable=writable, fakeroot=writable == "disk")
            sandbox = await sandboxes.create(writable, spec)
            assert b"Connection refused" in (await sandbox.exec(look, 60)).stderr
            await sandbox.exec(["bash", "-c", "echo 127.0.0.1 mine >> /etc/hosts"], 60)
            await sandbox.end_processes()
            assert (b"mine" in (await sandbox.exec(look, 60)).stdout) == (writable == "disk")
            await sandbox.close()

    asyncio.run(main())
    assert (small_image / "etc" / "hosts").read_text() == ""


def test_a_machine_without_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"not installed; install it, or .* --sandbox bubblewrap"):
        Sandboxes("apptainer", tmp_path).check()


def test_one_that_does_not_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="does not run"):
        Sandboxes("apptainer", tmp_path).check()
