from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.system.plugins import load_plugin, offered

if TYPE_CHECKING:
    from pathlib import Path


def install(folder: Path, package: str, *lines: str) -> None:
    info = folder / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(("[prorl_zmq.trials]", *lines)))


def test_two_packages_that_offer_one_name_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was found last was taken, and nobody said so."""
    install(tmp_path, "one", "shared = json:loads", "own = json:dumps")
    install(tmp_path, "other", "shared = json:dumps")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert list(offered("prorl_zmq.trials")) == ["own", "shared"]
    assert load_plugin("prorl_zmq.trials", "own", "trial") is __import__("json").dumps
    with pytest.raises(ConfigError, match="kind shared is offered by") as caught:
        load_plugin("prorl_zmq.trials", "shared", "trial")
    assert "json:loads (of one)" in caught.value.message
    assert "json:dumps (of other)" in caught.value.message
    assert "uninstall all but one" in caught.value.message


def test_one_package_that_is_found_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout and an installed wheel, say."""
    for folder in ("checkout", "wheel"):
        install(tmp_path / folder, "one", "shared = json:loads")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "checkout"), str(tmp_path / "wheel"), *sys.path])
    assert load_plugin("prorl_zmq.trials", "shared", "trial") is __import__("json").loads


def test_installed_packages_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that makes ten kinds of things would else read a file of each of hundreds of packages ten times."""
    install(tmp_path, "one", "shared = json:loads")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert list(offered("prorl_zmq.trials")) == ["shared"]
    (tmp_path / "one-1.dist-info" / "entry_points.txt").unlink()
    assert load_plugin("prorl_zmq.trials", "shared", "trial") is __import__("json").loads
