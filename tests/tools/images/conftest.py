"""What the tests of images share: a tiny root filesystem, a store, and running things as another user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rootfs import tiny_root_filesystem

import prorl_zmq
from prorl_zmq import tools
from prorl_zmq.tools.images.image_store import ImageStore

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_apptainer = pytest.mark.skipif(shutil.which("apptainer") is None, reason="Apptainer is not installed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
USER = 65534
"""Apptainer wants one who has a name: nobody."""
IMAGE = ("-m", "prorl_zmq.cli", "prorl", "image")
CLI = (sys.executable, "-P", *IMAGE)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A root filesystem of 5 MB, this test's own."""
    return tiny_root_filesystem(tmp_path / "tiny")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def few_programs(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Apptainer and debootstrap, but with the tools that every system has."""
    del tiny  # made before, with programs that will not be found
    folder = tmp_path / "few"
    folder.mkdir()
    for name in ("cp", "rm", "chmod", "flock"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))


@pytest.fixture
def user_folder() -> Iterator[Path]:
    """A folder of the unprivileged user, which pytest's own private folders are not."""
    folder = Path(tempfile.mkdtemp(prefix="prorl-t-"))
    try:
        tiny_root_filesystem(folder / "tiny")
        subprocess.run(["chown", "-R", f"{USER}:{USER}", str(folder)], check=True)
        yield folder
    finally:
        shutil.rmtree(folder)


def as_user(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program as an unprivileged user."""
    become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "env", f"HOME={folder}"]
    return subprocess.run([*become, *argv], cwd=folder, capture_output=True, text=True, check=False, timeout=100)


def python_as_user(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this package as an unprivileged user, who may not be allowed to read this Python."""
    links = folder / "links" / "prorl_zmq"
    if not links.exists():
        links.mkdir(parents=True)
        for source in (Path(prorl_zmq.__file__).parent, Path(tools.__file__).parent):
            target = links if source.name == "prorl_zmq" else links / source.name
            for each in source.iterdir() if target == links else ():
                (target / each.name).symlink_to(each)
            if target != links and not target.exists():
                target.symlink_to(source)
    path = f"{links.parent}:{sysconfig.get_paths()['purelib']}"
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, system):
        command = ["env", f"PYTHONPATH={path}", python, "-P"]
        if as_user(folder, *command, "-c", "import prorl_zmq.tools.images.program").returncode == 0:
            return as_user(folder, *command, *arguments)
    pytest.skip("another user cannot read Python or this package")


def leftovers(store: ImageStore, name: str) -> set[str]:
    """What is in the folder of an image beside the lock and the image that has the name."""
    current = (store.root / name).resolve().parent.name if (store.root / name).is_symlink() else ""
    folder = store.root / f".{name}"
    return {each.name for each in folder.iterdir()} - {"lock", current} if folder.exists() else set()
