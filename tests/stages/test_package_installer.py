"""npm and Python as they are on this machine; packages are files, so that no registry is asked."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest
from needed import lacking

from prorl_zmq.errors import ConfigError, SandboxFailed
from prorl_zmq.stages.harness.adapter import Npm, PyPI
from prorl_zmq.stages.package_installer import PackageInstaller, find_python

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 100.0


def ignored(line: str) -> None:
    del line


@pytest.fixture
def package(tmp_path: Path) -> str:
    """A package of npm, whose script would tell if it were run; its version is where it lies."""
    if shutil.which("npm") is None:
        lacking("harness", "npm is not installed")
    scripts = {"postinstall": f"touch {tmp_path}/ran"}
    about = {"name": "tiny", "version": "1.0.0", "bin": {"tiny": "cli.js"}, "scripts": scripts}
    path = tmp_path / "tiny.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("package.json", json.dumps(about)), ("cli.js", "#!/bin/sh\necho hello\n"), ("tool", "")):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text), 0o755 if name == "cli.js" else 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return f"file:{path}"


def install(package: Npm, version: str, folder: Path) -> None:
    folder.mkdir()
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        assert PackageInstaller(package, version, LIMIT_S, ignored).install(folder, lock.fileno()) == ""


@pytest.mark.proof(quick=True)
def test_a_package_of_npm_can_be_moved_and_its_scripts_are_not_run(package: str, tmp_path: Path) -> None:
    install(
        Npm("tiny", "1.0.0", program="t*y/cli.js", command="hello", executables=("tiny/tool",)), package, tmp_path / "a"
    )
    (tmp_path / "a").rename(tmp_path / "b")
    done = subprocess.run([tmp_path / "b" / "bin" / "hello"], capture_output=True, text=True, check=True)
    assert done.stdout == "hello\n"
    assert os.access(tmp_path / "b" / "node_modules" / "tiny" / "tool", os.X_OK)
    assert not (tmp_path / "ran").exists()


@pytest.mark.proof(quick=True)
def test_a_package_that_lacks_its_program_is_said(package: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match=r"tiny file:.* has no tiny/\w+/run; version 1\.0\.0 was tried"):
        install(Npm("tiny", "1.0.0", program="tiny/{arch}/run", command="tiny"), package, tmp_path / "a")


@pytest.mark.proof(quick=True)
@pytest.mark.usefixtures("package")
def test_what_npm_says_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match=r"npm failed with exit code \d+: .*nothing\.tgz"):
        install(Npm("tiny", "1.0.0", program="x", command="x"), f"file:{tmp_path}/nothing.tgz", tmp_path / "a")


def test_a_machine_without_npm_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"npm, which installs tiny, is not on this machine; install Node\.js"):
        PackageInstaller(Npm("tiny", "1.0.0", program="x", command="x"), "1.0.0", LIMIT_S, ignored)


@pytest.mark.proof(quick=True)
def test_a_machine_without_the_python_is_told_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"no Python 3\.99 or newer with venv; install one"):
        PackageInstaller(PyPI("tiny", "1.0.0", python=(3, 99)), "1.0.0", LIMIT_S, ignored)


def test_a_python_that_is_found_is_new_enough_and_starts() -> None:
    found = find_python((3, 11))
    assert found.version >= (3, 11)
    code = "import sys; print(*sys.version_info[:2], sys.base_prefix)"
    done = subprocess.run([found.program, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{found.version[0]} {found.version[1]} {found.prefix}\n"


def test_a_python_that_images_would_hide_is_the_last_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version, prefix in (("python3.12", "3 12 0", "/usr"), ("python3.14", "3 14 2", "/opt/python")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version} {prefix}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python3.12"))
    assert find_python((3, 11)).program == "/opt/python/bin/python3.14"
    assert find_python((3, 11), (3, 13)).program == "/usr/bin/python3.12"
    assert find_python((3, 11), (3, 12, 0)).program == "/usr/bin/python3.12"
    with pytest.raises(ConfigError, match=r"no Python 3\.11 to 3\.11\.9 with venv; install one"):
        find_python((3, 11), (3, 11, 9))
