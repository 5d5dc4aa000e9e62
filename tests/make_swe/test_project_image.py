"""Images of projects: what they share with their base, and copies of the project's source that must not be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.make_swe.project import fetch
from prorl_zmq.make_swe.project_image import Base, build_image, share_files
from prorl_zmq.tools.images.image_store import ImageStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_files_that_are_the_same_become_one(tmp_path: Path) -> None:
    base, image = tmp_path / "base", tmp_path / "image"
    for folder, other in ((base, "one"), (image, "two")):
        (folder / "usr").mkdir(parents=True)
        (folder / "usr/same").write_text("same")
        (folder / "usr/other").write_text(other)
        (folder / "usr/mode").write_text("mode")
        (folder / "usr/link").symlink_to("same")
    (image / "usr/new").write_text("new")
    (image / "usr/mode").chmod(0o755)
    assert share_files(base, image) == 4
    assert (image / "usr/same").samefile(base / "usr/same")
    assert not (image / "usr/mode").samefile(base / "usr/mode")
    assert (image / "usr/other").read_text() == "two"
    assert (base / "usr/other").read_text() == "one"
    assert sorted(each.name for each in (image / "usr").iterdir()) == ["link", "mode", "new", "other", "same"]
    assert share_files(base, image) == 0


def test_a_base_image_that_has_the_answer_is_refused(tmp_path: Path, write_project: Callable[..., Path]) -> None:
    source = write_project(tmp_path / "shop")
    copy = tmp_path / "base/usr/lib/shop_prices.py"
    copy.parent.mkdir(parents=True)
    copy.write_text((source / "src/shop/prices.py").read_text())
    work = tmp_path / "work"
    work.mkdir()
    base = Base(tmp_path / "base", "x", "3.11", "/usr/lib/python3")
    with pytest.raises(ConfigError, match=r"has a copy of src/shop/prices\.py, in usr/lib/shop_prices\.py"):
        build_image(ImageStore(tmp_path / "images"), base, fetch(str(source), work), [], work, say=print, heard=print)
