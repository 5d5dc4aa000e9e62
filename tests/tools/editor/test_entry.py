"""Where paths lead: links inside a root are followed, and none leads out of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.tools.editor.entry import find_entry
from prorl_zmq.tools.editor.outcome import Refused

NAMES = ["a", "b", "c"]
TARGET = st.lists(st.sampled_from([*NAMES, "..", "."]), min_size=1, max_size=4).map("/".join)


def found(path: str, root: Path) -> tuple[int, int]:
    with find_entry(path, str(root), str(root)) as entry:
        status = os.stat(entry.name, dir_fd=entry.folder, follow_symlinks=False)
        return status.st_dev, status.st_ino


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "inner/../../outside", "/", "..", "inner/up/../../.."])
def test_links_do_not_lead_out(workspace: Any, target: str) -> None:
    (workspace.root.parent / "outside").write_bytes(b"secret")
    (workspace.root / "inner").mkdir()
    (workspace.root / "inner/up").symlink_to("..")
    (workspace.root / "link").symlink_to(target)
    for path in ("link", "link/etc/passwd", "link/outside", str(workspace.root / "link")):
        outcome = workspace("view", path)
        assert not outcome.ok
        assert "leads out of the workspace" in outcome.text or "not a directory" in outcome.text
        assert not workspace("create", path + "/new", file_text="x").ok
    assert sorted(path.name for path in workspace.root.parent.iterdir()) == ["outside", "workspace"]


def test_paths_do_not_lead_out(workspace: Any) -> None:
    (workspace.root.parent / "workspace2").mkdir()
    for path in ("/etc/passwd", "/", str(workspace.root.parent), str(workspace.root) + "2"):
        assert "leads out of the workspace" in workspace.refused("view", path)


def test_links_inside_are_followed(workspace: Any) -> None:
    root = workspace.root
    (root / "x/y").mkdir(parents=True)
    workspace.write(b"found", "x/y/file")
    (root / "absolute").symlink_to(root / "x")
    (root / "relative").symlink_to("absolute/y")
    (root / "x/up").symlink_to("../relative/../y/file")
    for path in ("absolute/y/file", "relative/file", "x/up", str(root / "relative/file"), "./x//y/./file"):
        assert workspace.done("view", path).endswith("\tfound\n")
    other = root.parent / "other"
    other.symlink_to(root)
    with find_entry(str(root / "x"), str(other), str(other)) as entry:
        assert entry.name == b"x"


def test_links_in_a_circle(workspace: Any) -> None:
    (workspace.root / "a").symlink_to("b")
    (workspace.root / "b").symlink_to("a")
    (workspace.root / "c").symlink_to("c/c")
    for path in ("a", "c", "a/x"):
        assert "too many symbolic links" in workspace.refused("view", path)


def test_new_files_behind_links(workspace: Any) -> None:
    (workspace.root / "link").symlink_to("folder/new")
    workspace.done("create", "link", file_text="x")
    assert workspace.read("folder/new") == b"x"
    (workspace.root / "out").symlink_to("/nowhere-at-all/new")
    assert "leads out" in workspace("create", "out", file_text="x").text


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d/a", "d/b", "d/e/c"]), TARGET, max_size=5), TARGET)
def test_the_walk_agrees_with_the_kernel(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, str], path: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "d/e").mkdir(parents=True)
    for name, target in links.items():
        (root / name).symlink_to(target.replace("c", "d"))
    path = path.replace("..", "d")
    try:
        status = (root / path).stat()
        real = (root / path).resolve()
        expected = (status.st_dev, status.st_ino) if real.is_relative_to(root) else None
    except (OSError, RuntimeError):
        expected = None
    try:
        actual = found(path, root)
    except (OSError, Refused):
        actual = None
    # The kernel may go out of the root and come back in; the walk does not.
    assert actual == expected or actual is None
    if expected is not None and ".." not in "".join(links.values()):
        assert actual == expected


def test_the_whole_machine_as_root(workspace: Any) -> None:
    workspace.write(b"found")
    (workspace.root / "link").symlink_to("../" * 50 + str(workspace.root)[1:] + "/file")
    with find_entry("link", "/", str(workspace.root)) as entry:
        assert entry.name == b"file"
    with find_entry("/", "/", "/") as entry:
        assert entry.name == b"."


def test_no_descriptor_stays_open(workspace: Any) -> None:
    workspace.write(b"a")
    (workspace.root / "out").symlink_to("/etc")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in ("file", "none", "file/x", "out", "a/b/c"):
        workspace("view", path)
        workspace("str_replace", path, old_str="a", new_str="b")
        workspace("create", path, file_text="x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
