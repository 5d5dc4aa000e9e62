"""Removing a folder that others remove as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_zmq.tools.containers.tree import remove_tree

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_is_removed_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "box" / "deep").mkdir(parents=True)
    (tmp_path / "box" / "deep" / "file").write_text("x")
    (tmp_path / "other").mkdir()
    remove_tree(tmp_path / "box", 30.0)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_is_gone_with_its_parent_is_removed(tmp_path: Path) -> None:
    """Without an answer to that it looked for the folder until its time was up, and failed."""
    remove_tree(tmp_path / "gone" / "box", 0.5)
    assert not (tmp_path / "gone").exists()
