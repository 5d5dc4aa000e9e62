"""Where projects come from, and what their repository is like."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import ConfigError, SandboxFailed, SandboxUnavailable
from prorl_zmq.make_swe.project import IGNORED, fetch, read_metadata
from prorl_zmq.make_swe.recipe import load_recipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BACKEND = """
import os
def get_requires_for_build_wheel(settings=None): return []
def prepare_metadata_for_build_wheel(folder, settings=None):
    open("/dev/null")
    os.mkdir(f"{folder}/shop-1.2.dist-info")
    with open(f"{folder}/shop-1.2.dist-info/METADATA", "w") as file:
        file.write("Metadata-Version: 2.1\\nName: shop\\nVersion: 1.2\\n")
    return "shop-1.2.dist-info"
def build_wheel(*arguments): raise SystemExit("nobody asked for a wheel")
"""
SYSTEM = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
INFO = """Metadata-Version: 2.1
Name: shop
Version: 1.2
License: MIT
Requires-Dist: numbers>=2
Requires-Dist: old; python_version < "3.9"
Requires-Dist: freezegun; extra == "tests"
Requires-Dist: sphinx; extra == "docs"
Requires-Dist: shop[more]; extra == "tests"

About it.
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that is pip's only index and has the source archive of one release; gives its checksum."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "shop-1.2.tar.gz"
    files = {
        "PKG-INFO": INFO,
        "backend.py": BACKEND,
        "pyproject.toml": SYSTEM,
        "shop.py": "A = 1\n",
        "test_shop.py": "",
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"shop-1.2/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_becomes_a_clean_repository(tmp_path: Path, work: Path, write_project: Callable[..., Path]) -> None:
    source = write_project(tmp_path / "shop")
    (source / ".gitignore").write_text("*.py\n*.pyc")
    project = fetch(str(source), work)
    listed = subprocess.run(["git", "ls-files"], cwd=project.folder, capture_output=True, text=True, check=True).stdout
    assert listed.split() == [
        *(".gitignore", "pyproject.toml", "src/shop/__init__.py", "src/shop/prices.py", "tests/test_prices.py")
    ]
    assert set(IGNORED) | {"*.py"} <= set((project.folder / ".gitignore").read_text().splitlines())
    assert project.import_paths == ("src", ".")
    assert project.label == "shop-1.2"
    (work / "again").mkdir()
    assert fetch(str(source), work / "again").commit == project.commit


def test_a_clone_has_no_history(tmp_path: Path, work: Path, write_project: Callable[..., Path]) -> None:
    source = write_project(tmp_path / "shop")
    (source / ".git/HEAD").unlink()
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (["init", "--quiet"], ["add", "--all"], [*who, "commit", "--quiet", "--message=secret"]):
        subprocess.run(["git", *arguments], cwd=source, check=True)
    project = fetch(f"file://{source}", work)
    shown = subprocess.run(
        ["git", "log", "--all", "--format=%s"], cwd=project.folder, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "The project as it was released\n"
    assert not (project.folder / ".git/logs").exists()
    assert "url" not in (project.folder / ".git/config").read_text()
    assert project.metadata.name == "shop"


@pytest.mark.proof(quick=True)
def test_a_release_is_fetched_once_if_its_checksum_is_known(
    index: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch("shop==1.2", work, sha256=index)
    assert (first.folder / "shop.py").read_text() == "A = 1\n"
    assert not (first.folder / "PKG-INFO").exists()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    (work / "again").mkdir()
    assert fetch("shop==1.2", work / "again", sha256=index).commit == first.commit


@pytest.mark.proof(quick=True)
def test_another_checksum_is_refused(index: str, work: Path) -> None:
    with pytest.raises(ConfigError, match="checksum is not the one"):
        fetch("shop==1.2", work, sha256=index[::-1])


@pytest.mark.proof(quick=True)
def test_a_release_that_does_not_exist_is_named(index: str, work: Path) -> None:
    with pytest.raises(ConfigError, match=r"shop==7\.0 cannot be fetched"):
        fetch("shop==7.0", work)


@pytest.mark.proof(quick=True)
def test_without_a_network_it_says_so(index: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")  # pip is silent about none
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(SandboxFailed, match="no network"):
        fetch("shop==1.2", work)


@pytest.mark.parametrize(
    ("source", "words"), [("/nowhere", "there is no such folder"), ("file:///nowhere.git", "cannot be cloned")]
)
def test_a_source_that_is_not_there_is_named(source: str, words: str, work: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        fetch(source, work)


def test_without_git_it_says_so(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a.py").write_text("")
    with pytest.raises(SandboxUnavailable, match="git is not installed"):
        fetch(f"file://{tmp_path}", work)


def test_requirements_are_those_of_the_tests_on_that_python(tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text(INFO)
    metadata = read_metadata(tmp_path)
    assert metadata.requirements_for("3.11") == ("numbers>=2", "freezegun")
    assert metadata.requirements_for("3.8") == ("numbers>=2", "old", "freezegun")


@pytest.mark.parametrize(
    ("text", "permissive"),
    [
        ("MIT", True),
        ("Apache-2.0", True),
        ("License :: OSI Approved :: BSD License", True),
        ("ISC License (ISCL)", True),
        ("GPL-3.0-only", False),
        ("LGPL", False),
        ("MIT AND GPL-2.0-only", False),
        ("License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)", False),
        ("Proprietary", False),
        ("", False),
        ("permitted", False),
    ],
)
def test_permissive_licenses_are_told_from_others(text: str, permissive: bool, tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").write_text(f"[metadata]\nname = a\nlicense = {text}\n")
    assert read_metadata(tmp_path).permissive is permissive


def test_swe_mini_has_a_checksum_and_pinned_requirements_for_each_of_its_projects() -> None:
    recipe = load_recipe("swe-mini")
    assert len(recipe.project) >= 6
    assert sum(order.instances for order in recipe.project) >= 24
    for order in recipe.project:
        assert len(order.sha256) == 64
        assert order.permissive_only
        assert all("==" in requirement for requirement in order.requirements or ())
        assert any(requirement.startswith("pytest==") for requirement in order.requirements or ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("project = 3", "malformed"),
        ('[[project]]\nsource = "a"\nother = 1', "malformed"),
        ('[[project]]\nsource = "a==1"', "has no sha256 for a==1"),
        ("[[project", "malformed"),
    ],
)
def test_a_malformed_recipe_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_recipe(str(path))


def test_malformed_metadata_is_named(tmp_path: Path, work: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "setup.cfg").write_text("name = x\n")
    with pytest.raises(ConfigError, match="metadata is malformed"):
        fetch(str(tmp_path / "source"), work)
