from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from support.sandboxes import on_each_kind, on_isolated_kinds

from prorl_zmq.errors import SandboxFailed
from prorl_zmq.system.open_files import raise_open_files
from prorl_zmq.tools.containers.specification import SPEC, SandboxSpec
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.tools.sandbox.sweeping import sweep_abandoned
from prorl_zmq.wire.messages.jobs import SandboxHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.sandboxes import SharedSandboxes


@on_each_kind
def test_another_process_attaches_by_the_handle(sandboxes: Sandboxes, image: str) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("job-1.2")
        assert stat.S_IMODE(sandboxes.root.stat().st_mode) == 0o700
        await sandbox.write_file("file", b"1")
        bash = await sandbox.bash()
        await bash.run("X=1", 20)
        other = await Sandboxes(sandboxes.kind, sandboxes.root).attach(sandbox.handle)
        assert (await other.exec(["cat", "file"], 20)).stdout == b"1"
        assert (await other.bash_session(bash.number).run("echo $X", 20)).output == "1\n"
        assert other.spec == SandboxSpec(image=image)
        assert not sandbox.held
        with pytest.raises(SandboxFailed, match="is gone"):
            await bash.run("true", 20)
        sandbox.release()
        await other.close()
        with pytest.raises(SandboxFailed, match="is gone"):
            await sandboxes.attach(sandbox.handle)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a" * 129, "ä", "a\n"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SandboxFailed, match="not a name for a sandbox"):
        asyncio.run(Sandboxes("process", tmp_path).create(name))
    assert list(tmp_path.iterdir()) == []


def test_a_taken_name_is_refused(sandboxes_of: SharedSandboxes) -> None:
    async def main() -> None:
        sandboxes = sandboxes_of("process")
        sandbox = await sandboxes.create("one")
        await sandbox.write_file("file", b"")
        with pytest.raises(SandboxFailed, match="exists already"):
            await sandboxes.create("one")
        assert await sandbox.read_file("file") == b""
        await sandbox.close()

    asyncio.run(main())


def test_foreign_handles_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / SPEC).write_text("{}")
    root.mkdir()
    (root / "link").symlink_to(outside)

    async def main() -> None:
        sandboxes = Sandboxes("process", root, "node-1")
        for message, handle in {
            "on node node-2": SandboxHandle("process", str(root / "one"), "node-2"),
            "allows process": SandboxHandle("bubblewrap", str(root / "one"), "node-1"),
            "not a sandbox's folder": SandboxHandle("process", str(outside), "node-1"),
            "not a sandbox's": SandboxHandle("process", str(root / ".."), "node-1"),
            "link is gone": SandboxHandle("process", str(root / "link"), "node-1"),
            "two is gone": SandboxHandle("process", str(root / "two"), "node-1"),
        }.items():
            with pytest.raises(SandboxFailed, match=message):
                await sandboxes.attach(handle)

    asyncio.run(main())


def test_a_disk_that_refuses_is_a_sandbox_failed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxFailed, match="cannot be made"):
        asyncio.run(Sandboxes("process", tmp_path / "file").create("one"))


@on_isolated_kinds
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "there is no image"),
        (lambda path: path.mkdir() or path, "could not start|not a root filesystem"),
        (
            lambda path: path.write_bytes(b"hsqs" + bytes(5000)) and path,
            "neither a directory nor a SIF|takes directories only",
        ),
    ],
    ids=["missing", "empty folder", "corrupt"],
)
def test_an_image_that_is_none_is_said(
    sandboxes: Sandboxes, tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    image = make(tmp_path / "image.sif")

    async def main() -> None:
        with pytest.raises(SandboxFailed, match=message):
            await sandboxes.create("one", SandboxSpec(image=str(image)))
        assert list(sandboxes.root.glob("*")) == []

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["apptainer"], indirect=True)
def test_apptainer_without_an_image_says_what_to_do(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        bare = Sandboxes("apptainer", sandboxes.root)
        with pytest.raises(SandboxFailed, match="needs an image"):
            await bare.create("one")
        bare.close()

    asyncio.run(main())


def test_what_a_killed_maker_left_half_made_is_swept(tmp_path: Path) -> None:
    """A stage process that was killed while it copied a sandbox left the copy there for ever."""
    script = (
        "import os, sys; from pathlib import Path; from prorl_zmq.tools.sandbox.sandboxes import Sandboxes\n"
        "sandboxes = Sandboxes('process', Path(sys.argv[1])); sandboxes.make_folder('abandoned')\n"
        "print('made', flush=True); sys.stdin.read()"
    )
    maker = subprocess.Popen(
        [sys.executable, "-P", "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert maker.stdout is not None
    assert maker.stdout.readline() == b"made\n"
    ours = Sandboxes("process", tmp_path)
    path = ours.make_folder("wanted")
    sweep_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["abandoned", "wanted"]  # both makers live
    with maker:
        maker.kill()
    sweep_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    ours.unlock_folder(path)


def test_a_killed_spawner_is_no_zombie_and_is_started_again(tmp_path: Path) -> None:
    """It stayed a zombie until the stage process ended."""

    def spawners() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in before]

    async def main() -> None:
        sandboxes = Sandboxes("process", tmp_path)
        first = await sandboxes.create("one")
        (spawner,) = spawners()
        spawner.kill()
        deadline = time.monotonic() + 20
        while psutil.pid_exists(spawner.pid):
            assert time.monotonic() < deadline, spawner.status()
            await asyncio.sleep(0.02)
        second = await sandboxes.create("two")
        # The server of the first sandbox may be among them, if this process adopts orphans.
        alive = [child for child in spawners() if child.status() != psutil.STATUS_ZOMBIE]
        assert alive
        assert alive == spawners()
        for sandbox in (first, second):
            await sandbox.close()
        sandboxes.close()

    before = {child.pid for child in psutil.Process().children()}
    asyncio.run(main())


def test_sandboxes_work_where_many_files_are_open(tmp_path: Path) -> None:
    """`select` ended what starts execution servers, and the wait for a program's start, beyond 1,024."""

    async def run() -> bytes:
        sandboxes = Sandboxes("process", tmp_path / "sandboxes", "local")
        sandbox = await sandboxes.create("many.1")
        done = await sandbox.exec(("echo", "hello"), 20.0)
        await sandbox.close()
        sandboxes.close()
        return done.stdout

    raise_open_files()
    with ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(Path(os.devnull).open("rb"))
        assert asyncio.run(run()) == b"hello\n"
