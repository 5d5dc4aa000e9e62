"""An image with a small repository at /testbed: a history with a fault, its mending, and a tag on that."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from rootfs import root_filesystem

if TYPE_CHECKING:
    from pathlib import Path

BUGGED = 'def double(number):\n    """Twice a number."""\n    return number * 3\n'
CLEAN = BUGGED.replace("* 3", "* 2")
RUN_TESTS = """\
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/testbed")
from calculator import double
failed = 0
for name, right in (("test_two", lambda: double(2) == 4), ("test_zero", lambda: double(0) == 0)):
    passed = right()
    failed += not passed
    print("PASSED" if passed else "FAILED", f"tests/test_double.py::{name}")
sys.exit(failed > 0)
"""
"""Prints what `pytest -rA` would."""
TEST_COMMAND = "python3 tests/run.py"


def make_image(folder: Path) -> tuple[Path, str]:
    """Make the image; give its folder and the commit before the fault was mended.

    The system's files are hard links to those of the tests' root filesystem.
    """
    image = folder / "calculator"
    shutil.copytree(root_filesystem(), image, symlinks=True, copy_function=os.link)
    testbed = image / "testbed"
    (testbed / "tests").mkdir(parents=True)
    (testbed / "tests" / "run.py").write_text(RUN_TESTS)
    (testbed / ".gitignore").write_text("__pycache__\nextra\n")
    (testbed / "extra").mkdir()
    (testbed / "extra" / "run.py").write_text(RUN_TESTS)
    (testbed / "__pycache__").mkdir()
    (testbed / "__pycache__" / "calculator.pyc").write_text(CLEAN)
    if (program := shutil.which("patch")) is not None:
        shutil.copy(program, image / "usr" / "bin" / "patch")
    (testbed / "calculator.py").write_text(BUGGED)
    git(testbed, "init", "-q", "-b", "main", ".")
    git(testbed, "add", "-A")
    git(testbed, "commit", "-qm", "first")
    before = git(testbed, "rev-parse", "HEAD").strip()
    (testbed / "calculator.py").write_text(CLEAN)
    git(testbed, "commit", "-qam", "mend it")
    git(testbed, "tag", "v2")
    git(testbed, "branch", "release")
    git(testbed, "remote", "add", "origin", "https://example.invalid/calculator")
    git(testbed, "update-ref", "refs/kept/file", git(testbed, "rev-parse", "HEAD:calculator.py").strip())
    add_submodule(testbed, folder / "other")
    git(testbed, "repack", "-qad")
    for pack in (testbed / ".git" / "objects" / "pack").glob("*.pack"):
        pack.with_suffix(".keep").touch()
    git(testbed, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(testbed, "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")  # as `git clone` leaves it
    return image, before


def add_submodule(testbed: Path, other: Path) -> None:
    """Leave the clone of a submodule, whose history goes on after what the repository uses of it."""
    other.mkdir()
    git(other, "init", "-q", "-b", "main", ".")
    (other / "part.py").write_text(BUGGED)
    git(other, "add", "-A")
    git(other, "commit", "-qm", "first")
    used = git(other, "rev-parse", "HEAD").strip()
    (other / "part.py").write_text(CLEAN)
    git(other, "commit", "-qam", "mend it there")
    module = testbed / ".git" / "modules" / "part"
    git(testbed, "clone", "-q", "--bare", str(other), str(module))
    git(module, "update-ref", "--no-deref", "HEAD", used)


def git(folder: Path, *arguments: str) -> str:
    """Run git with an identity of its own."""
    who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
