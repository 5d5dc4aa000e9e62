"""Installing harnesses, from a folder of packages in place of a registry."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import tiny_harness

from prorl_zmq.errors import ConfigError, SandboxFailed
from prorl_zmq.stages import package_installer
from prorl_zmq.stages.harness.harness_store import HarnessStore
from prorl_zmq.stages.package_store import RECORD
from prorl_zmq.tools.containers.specification import Bind
from prorl_zmq.tools.images.kept_folder import locked


def ignored(line: str) -> None:
    del line


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HarnessStore:
    """A store in which nothing is installed, and a harness `tiny` to install."""
    for name, value in tiny_harness.offer(tmp_path / "offered").items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path / "offered"))
    return HarnessStore()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install without pip, whose part one test has for real."""

    def install(self: package_installer.PackageInstaller, folder: Path, lock: int) -> str:
        del self, lock
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(sys.executable)
        return "/opt/python"

    monkeypatch.setattr(package_installer.PackageInstaller, "install", install)


@pytest.mark.proof(quick=True)
def test_a_harness_is_installed_found_listed_and_removed(store: HarnessStore) -> None:
    said: list[str] = []
    heard: list[str] = []
    made = store.install("tiny", say=said.append, heard=heard.append)
    assert said == ["installing tiny 1.0 from PyPI"]
    assert any("Successfully installed tiny-harness-1.0" in line for line in heard)
    assert made.folder == str(store.root / "tiny" / "1.0")
    assert (Path(made.folder) / "bin" / "python").exists()
    assert made.size_bytes > 100_000
    assert store.find("tiny") == store.find("tiny==1.0") == made
    assert store.list() == [made]
    assert made.binds[0] == Bind(made.folder, made.folder)
    assert made.base.startswith("/usr") or made.binds[1:] == (Bind(made.base, made.base),)
    assert store.install("tiny", say=said.append, heard=ignored) == made
    assert said[1:] == ["tiny 1.0 is installed already"]
    store.remove("tiny", say=ignored)
    assert list(store.root.iterdir()) == []


@pytest.mark.proof
def test_a_version_that_there_is_not_leaves_nothing(store: HarnessStore) -> None:
    with pytest.raises(SandboxFailed, match=r"python failed with exit code 1: .*tiny-harness==9\.9"):
        store.install("tiny==9.9", say=ignored, heard=ignored)
    assert [path.name for path in (store.root / "tiny").iterdir()] == ["lock"]
    assert store.list() == []


@pytest.mark.usefixtures("quick")
def test_versions_lie_beside_each_other(store: HarnessStore) -> None:
    second = store.install("tiny==2.0", say=ignored, heard=ignored)
    assert store.find("tiny") == second  # the only one
    first = store.install("tiny", say=ignored, heard=ignored)
    assert store.find("tiny") == first  # the one that the adapter was tried with
    assert store.find("tiny==2.0") == second
    store.remove("tiny==1.0", say=ignored)
    assert store.list() == [second]


@pytest.mark.few(1)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("damage", ["record", "program", "moved"])
def test_a_broken_one_is_said_and_mended(store: HarnessStore, damage: str, tmp_path: Path) -> None:
    folder = Path(store.install("tiny", say=ignored, heard=ignored).folder)
    if damage == "record":
        (folder / RECORD).write_text("{")
    elif damage == "program":
        (folder / "bin" / "python").unlink()
        (folder / "bin" / "python").symlink_to(tmp_path / "gone")
    else:  # its scripts name the folder that it was in
        folder.rename(tmp_path / "elsewhere")
        shutil.copytree(tmp_path / "elsewhere", folder.parent / "3.0", symlinks=True)
        assert store.list() == []
        return
    with pytest.raises(ConfigError, match=r"tiny 1\.0 is broken in .*; run: prorl harness install tiny$"):
        store.find("tiny")
    store.install("tiny", say=ignored, heard=ignored)
    assert store.find("tiny").folder == str(folder)


def test_what_is_not_installed_is_said_with_the_command(store: HarnessStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiny 2\.0 is not installed in .*; run: prorl harness install tiny==2\.0$"):
        store.find("tiny==2.0")
    with pytest.raises(ConfigError, match=f"run: prorl harness install tiny --into {tmp_path}$"):
        HarnessStore(tmp_path).find("tiny")
    with pytest.raises(ConfigError, match=r"tiny is not installed in .*; see: prorl harness list"):
        store.remove("tiny", say=ignored)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "is not a kind of harness; installed are: aider, "),
        ("tiny==", "'' is not a version; write NAME==VERSION"),
        ("tiny==../../etc", "is not a version"),
        ("command", "nothing is installed for it"),
    ],
)
def test_names_that_are_none(store: HarnessStore, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        store.install(name, say=ignored, heard=ignored)
    assert not store.root.exists()


@pytest.mark.usefixtures("quick")
def test_two_do_not_install_at_once(store: HarnessStore) -> None:
    store.root.mkdir(parents=True)
    said: list[str] = []
    with (
        locked(store.root / "tiny", wait_s=1, say=ignored),
        pytest.raises(SandboxFailed, match=r"still holds .* after 0\.1 s"),
    ):
        store.install("tiny", say=said.append, heard=ignored, wait_s=0.1)
    assert "waiting for it to end" in said[0]
    store.install("tiny", say=ignored, heard=ignored)


@pytest.mark.usefixtures("quick")
def test_what_a_killed_installation_left_is_removed(store: HarnessStore) -> None:
    leftover = store.root / "tiny" / "building-1"
    leftover.mkdir(parents=True)
    assert store.list() == []
    store.install("tiny", say=ignored, heard=ignored)
    assert not leftover.exists()
