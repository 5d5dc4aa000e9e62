from __future__ import annotations

import asyncio
import stat
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import SandboxFailed
from prorl_zmq.messages import SandboxHandle
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from pathlib import Path


def test_another_process_attaches_by_the_handle(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("job-1.2")
        assert stat.S_IMODE(sandboxes.root.stat().st_mode) == 0o700
        sandbox.write_file("file", b"1")
        other = Sandboxes(sandboxes.kind, sandboxes.root).attach(sandbox.handle)
        assert (await other.run(["cat", "file"], 10)).stdout == b"1"
        await other.close()
        with pytest.raises(SandboxFailed, match="is gone"):
            sandboxes.attach(sandbox.handle)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a" * 129, "ä", "a\n"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SandboxFailed, match="no name for a sandbox"):
        asyncio.run(Sandboxes("process", tmp_path).create(name))
    assert list(tmp_path.iterdir()) == []


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        sandboxes = Sandboxes("process", tmp_path)
        sandbox = await sandboxes.create("one")
        sandbox.write_file("file", b"")
        with pytest.raises(SandboxFailed, match="exists already"):
            await sandboxes.create("one")
        assert sandbox.read_file("file") == b""

    asyncio.run(main())


def test_foreign_handles_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "outside" / "workspace").mkdir(parents=True)
    (root / "one" / "workspace").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "outside")
    sandboxes = Sandboxes("process", root, "node-1")
    for message, handle in {
        "on node node-2": SandboxHandle("process", str(root / "one"), "node-2"),
        "allows process": SandboxHandle("bubblewrap", str(root / "one"), "node-1"),
        "not a sandbox's folder": SandboxHandle("process", str(tmp_path / "outside"), "node-1"),
        "not a sandbox's": SandboxHandle("process", str(root / ".."), "node-1"),
        "link is gone": SandboxHandle("process", str(root / "link"), "node-1"),
        "two is gone": SandboxHandle("process", str(root / "two"), "node-1"),
    }.items():
        with pytest.raises(SandboxFailed, match=message):
            sandboxes.attach(handle)
    assert sandboxes.attach(SandboxHandle("process", str(root / "one"), "node-1")).path == root / "one"


def test_a_disk_that_refuses_is_a_sandbox_failed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxFailed, match="cannot be made"):
        asyncio.run(Sandboxes("process", tmp_path / "file").create("one"))
