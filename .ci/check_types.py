"""Type-check the installed wheel, and make sure that mypy saw all of it.

In the checkout mypy would say Success having read two folders of five: it does not follow the `package_dir` mapping of
setup.cfg. So it runs where nothing shadows the installed package, and the number of files that it read must be that of
the sources.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("prorl_zmq", "brokers", "stages", "tools")
TEMPLATES = ROOT / "prorl_zmq" / "examples" / "trainers"
"""Scripts of a user, left out by pyproject.toml."""


def main() -> int:
    """Run mypy; give its exit code, or 1 if it did not read every file."""
    sources = sum(1 for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if TEMPLATES not in file.parents)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "prorl_zmq"]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="", end="")
    if done.returncode != 0:
        return done.returncode
    read = re.search(r"no issues found in (\d+) source files", done.stdout)
    if read is None or int(read[1]) != sources:
        print(f"mypy did not read all {sources} source files")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
