"""Every mutant still applies to this tree, and its header can be read. `make mutants` sees that tests notice each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants.mutant import Change, DoesNotApply, InvalidPatch, Mutant, patch_files

ROOT = Path(__file__).resolve().parents[2]
PATCH = """Nothing is checked.

tier: unit
tests: tests/one.py -k "a and b"

--- a/one.py
+++ b/one.py
@@ -1,2 +1,2 @@
 def check():
-    return True
+    return False
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "one.patch"
    path.write_text(text)
    return path


def test_there_are_enough_of_them() -> None:
    assert len(patch_files()) >= 40


@pytest.mark.parametrize("path", patch_files(), ids=lambda path: path.stem)
def test_a_mutant_applies_and_names_tests(path: Path) -> None:
    mutant = Mutant.read(path)
    for name, text in mutant.texts(ROOT).items():
        assert name.split("/")[0] in {"prorl_zmq", "brokers", "stages", "tools"}
        ast.parse(text)
    named = [word.partition("::")[0] for word in mutant.tests if word.startswith("tests/")]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_patch_is_read_and_applied(tmp_path: Path) -> None:
    mutant = Mutant.read(write(tmp_path, PATCH))
    assert (mutant.name, mutant.breaks, mutant.tier) == ("one", "Nothing is checked.", "unit")
    assert mutant.tests == ("tests/one.py", "-k", "a and b")
    (tmp_path / "one.py").write_text("import os\n\n\ndef check():\n    return True\n")
    assert mutant.texts(tmp_path) == {"one.py": "import os\n\n\ndef check():\n    return False\n"}


@pytest.mark.parametrize(
    "text", ["def check():\n    return None\n", "def check():\n    return True\n" * 2, "x = 1; def check():\n", ""]
)
def test_a_file_that_has_changed_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.py").write_text(text)
    with pytest.raises(DoesNotApply, match=r"one\.py has the expected lines [02] times"):
        Mutant.read(write(tmp_path, PATCH)).texts(tmp_path)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(DoesNotApply, match=r"there is no one\.py"):
        Mutant.read(write(tmp_path, PATCH)).texts(tmp_path)


def test_lines_are_whole_ones() -> None:
    with pytest.raises(DoesNotApply):
        Change("one.py", "a = 1\n", "a = 2\n").applied("aa = 1\n")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tier: unit\n", "", "the header needs"),
        ("tier: unit", "tier: all", "the header needs"),
        ("tests: ", "test: ", "the header needs"),
        ("Nothing is checked.\n", "", "the header needs"),
        ("\n--- a/one.py", "\n", "no diff"),
        ("+++ b/one.py\n", "", "begins with"),
        ("+++ b/one.py", "+++ b/two.py", "needs one or more hunks"),
        ("@@ -1,2 +1,2 @@\n", "", "needs one or more hunks"),
        ("+    return False", "+    return True", "expects lines and changes some"),
        (" def check", "def check", "begins with a space"),
    ],
)
def test_a_malformed_patch_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in PATCH
    with pytest.raises(InvalidPatch, match=words):
        Mutant.read(write(tmp_path, PATCH.replace(old, new)))
