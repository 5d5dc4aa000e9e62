"""Root filesystems for tests: a Debian with Python, built once per machine by our own builder; and one of 5 MB."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
from needed import lacking

from prorl_zmq.tools.images.image import lock_image
from prorl_zmq.tools.images.image_store import ImageStore

TINY_PROGRAMS = ("bash", "cat", "cut", "echo", "getopt", "ls", "mkdir", "rm", "sed", "sleep", "true")
"""`getopt`, `cut` and `sed` are what the fakeroot of an unprivileged `%post` needs."""
FOLDERS = ("bin", "dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "usr/bin", "var/tmp")
PACKAGES = "git,python3"


@cache
def root_filesystem() -> Path:
    """Give a Debian's root filesystem as a directory image: bash, coreutils, Python, without devices.

    It is built by debootstrap the first time, which takes a minute and root, and then kept in the machine's folder for
    temporary files, where all users can read it. Do not change it. This process holds it until it ends. Skips the test
    where it cannot be built.
    """
    folder = Path(tempfile.gettempdir()) / "prorl-test-rootfs"
    store = ImageStore(folder)
    name = f"debian-{os.uname().machine}"
    if os.geteuid() != 0:
        if folder.exists() and folder.stat().st_uid not in (0, os.geteuid()):
            pytest.skip(f"{folder} belongs to another user")
        found = store.find(name)
        if found is None:
            lacking("debootstrap", "only root can build a root filesystem, and none is there yet")
        return lock_image(found.path).path
    if shutil.which("debootstrap") is None:
        lacking("debootstrap", "debootstrap is not installed")
    folder.mkdir(0o755, exist_ok=True)
    if folder.stat().st_uid != 0:
        pytest.skip(f"{folder} belongs to another user")
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")
    built = store.build(f"debootstrap://{suite}?include={PACKAGES}&variant=minbase", name)
    return lock_image(built.image.path).path


@cache
def _libraries(program: str) -> list[str]:
    """Return the libraries that a program of the host needs."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [word for word in listed.split() if word.startswith("/")]


def tiny_root_filesystem(folder: Path, *more: str) -> Path:
    """Make a root filesystem of a few of the host's own programs, and of `more`, and their libraries."""
    for each in FOLDERS:
        (folder / each).mkdir(parents=True)
    for program in (*TINY_PROGRAMS, *more):
        found = shutil.which(program)
        assert found is not None
        shutil.copy(found, folder / "bin" / program)
        for library in _libraries(found):
            if not (folder / library[1:]).exists():
                (folder / library[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, folder / library[1:])
    (folder / "bin" / "sh").symlink_to("bash")
    (folder / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (folder / "etc" / "group").write_text("root:x:0:\n")
    (folder / "etc" / "word").write_text("hello\n")
    return folder
