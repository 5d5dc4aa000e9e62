"""Apply each mutant to a copy of the tree and see that the tests it names fail: `make mutants`.

    python tests/mutants/run.py [NAME ...] [--whole-tier]

The product is imported from the copy: `PYTHONPATH` names a folder with its packages as they are installed, and child
processes inherit it. Nothing is installed. A test that fails with a mutant runs again without it: a test that fails
anyway kills nothing.

    killed           a named test failed, and passes without the mutant
    SURVIVED         the named tests passed
    does not apply   the source has changed: rewrite the patch
    not run          the named tests were skipped, were not found, could not be imported or did not end

All but the first let the run fail. With `--whole-tier`, all tests of the mutant's tier run after named tests that
passed, and the table says which test has taken over.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.mutant import DoesNotApply, Mutant, patch_files

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"prorl_zmq": "", "brokers": "brokers", "stages": "stages", "tools": "tools"}
"""The folders of the source tree, and where below `prorl_zmq` each is installed."""
SELECTIONS = {"proof": "proof"}
OTHERS = "not vllm and not proof"
"""What pytest selects of a tier: proofs, or all other tests."""
NAMED_LIMIT_S, TIER_LIMIT_S = 300, 3600
PYTEST = (sys.executable, "-P", "-m", "pytest", "-q", "-x", "-n0", "--tb=no", "-rfE", "-p", "no:cacheprovider")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::[\w:]+(?:\[.*?\](?= - |$))?)", re.MULTILINE)
_PASSED = re.compile(r"^(?:.*, )?\d+ passed", re.MULTILINE)
NO_TESTS = 5
"""pytest's exit code where nothing was selected."""


class Verdict(NamedTuple):
    word: str
    by: str = ""
    """The test that failed, or why none did."""

    @property
    def is_good(self) -> bool:
        return self.word == "killed"


def read_verdict(code: int, words: str) -> Verdict:
    """Return what pytest's exit code and summary say of a mutant."""
    if failed := _FAILED.search(words):
        return Verdict("killed", failed[1])
    if code == NO_TESTS:
        return Verdict("not run", "no test is selected")
    if code:
        return Verdict("not run", f"pytest ended with {code}: {words.strip()[-300:]}")
    return Verdict("SURVIVED") if _PASSED.search(words) else Verdict("not run", "the tests were skipped")


class Checkout:
    """A copy of the working tree, in which one mutant at a time is applied."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._site = folder / "site"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        for source, inside in PACKAGES.items():
            shutil.copytree(self.tree / source, self._site / "prorl_zmq" / inside, dirs_exist_ok=True)
        compileall.compile_dir(self._site, quiet=1)
        path = os.pathsep.join(filter(None, (str(self._site), os.environ.get("PYTHONPATH"))))
        self._environment = {**os.environ, "PYTHONPATH": path}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def check(self) -> None:
        """Raise unless children import the product from here."""
        code = "import prorl_zmq, prorl_zmq.brokers.loop as loop; print(prorl_zmq.__file__, loop.__file__)"
        found = self._run([sys.executable, "-P", "-c", code], NAMED_LIMIT_S)[1].split()
        if len(found) != 2 or not all(Path(each).is_relative_to(self._site) for each in found):
            raise SystemExit(f"mutants: the product is imported from {found or 'nowhere'}, not from {self._site}")

    def write(self, texts: dict[str, str]) -> None:
        """Write source files, as they are in the tree and as they are installed."""
        for name, text in texts.items():
            folder, _, rest = name.partition("/")
            installed = self._site / "prorl_zmq" / PACKAGES[folder] / rest
            for path in (self.tree / name, installed):
                path.write_text(text, encoding="utf-8")
            # Bytecode is told apart by time and size, which two versions of a second may share.
            Path(importlib.util.cache_from_source(str(installed))).unlink(missing_ok=True)

    def verdict(self, mutant: Mutant, *, whole_tier: bool) -> Verdict:
        try:
            texts = mutant.texts(self.tree)
        except DoesNotApply as error:
            return Verdict("does not apply", f"rewrite it: {error}")
        originals = {name: (self.tree / name).read_text(encoding="utf-8") for name in texts}
        self.write(texts)
        try:
            verdict = self._tested(mutant.tests, NAMED_LIMIT_S)
            if whole_tier and verdict.word == "SURVIVED":
                verdict = self._tested(("-m", SELECTIONS.get(mutant.tier, OTHERS), "tests"), TIER_LIMIT_S)
        finally:
            self.write(originals)
        if verdict.is_good and self._tested((verdict.by,), NAMED_LIMIT_S).word != "SURVIVED":
            return Verdict("not run", f"fails without the mutant too: {verdict.by}")
        return verdict

    def _tested(self, selection: tuple[str, ...], limit_s: float) -> Verdict:
        code, words = self._run([*PYTEST, *selection], limit_s)
        return read_verdict(code, words) if code is not None else Verdict("not run", f"no end within {limit_s} s")

    def _run(self, command: list[str], limit_s: float) -> tuple[int | None, str]:
        """Run a command in the tree; return its exit code, None if it did not end, and what it printed."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self.tree, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return code, output.read().decode(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description="Apply each mutant and see that the tests it names fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants by the names of their files (default: all)")
    parser.add_argument("--whole-tier", action="store_true", help="run the whole tier where the named tests pass")
    options = parser.parse_args()
    known = {path.stem: path for path in patch_files()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no mutant {', '.join(unknown)}; tests/mutants has: {', '.join(known)}")
    mutants = [Mutant.read(known[name]) for name in options.names or known]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests under way end and the copy is removed
    bad = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prorl-mutants-") as folder:
        checkout = Checkout(Path(folder))
        checkout.check()
        print(f"| {'mutant':<38} | {'tier':<7} | {'verdict':<14} | {'s':>4} | by", flush=True)
        print(f"|{'-' * 40}|{'-' * 9}|{'-' * 16}|{'-' * 6}|{'-' * 4}")
        for mutant in mutants:
            began = time.monotonic()
            verdict = checkout.verdict(mutant, whole_tier=options.whole_tier)
            seconds = time.monotonic() - began
            bad += not verdict.is_good
            row = f"| {mutant.name:<38} | {mutant.tier:<7} | {verdict.word:<14} | {seconds:4.0f} | {verdict.by}"
            print(row, flush=True)
    print(f"\n{len(mutants) - bad} of {len(mutants)} mutants were killed, in {time.monotonic() - started:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
