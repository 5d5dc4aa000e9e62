"""Programs of this machine that making instances needs: git, and pip of this interpreter. Each run has a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from ..errors import ConfigError, SandboxFailed, SandboxUnavailable
from ..system.processes import ISOLATED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

GIT_LIMIT_S = 300.0
PIP_LIMIT_S = 900.0
LAST_WORDS = 600
"""Characters of a failed program's output that an error shows."""
WRITTEN_AT = "2000-01-01T00:00:00+00:00"
GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "prorl",
    "GIT_AUTHOR_EMAIL": "prorl@localhost",
    "GIT_AUTHOR_DATE": WRITTEN_AT,
    "GIT_COMMITTER_NAME": "prorl",
    "GIT_COMMITTER_EMAIL": "prorl@localhost",
    "GIT_COMMITTER_DATE": WRITTEN_AT,
    "LC_ALL": "C.UTF-8",
}
"""Nobody's own settings, and the same commit for the same files."""


def git(*arguments: str, folder: Path, problem: str) -> str:
    """Run git; return what it says."""
    if shutil.which("git") is None:
        raise SandboxUnavailable("git is not installed; install its package", kind="git")
    # What a surrounding git command has set would lead to another repository.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    argv = ["git", "-c", "core.hooksPath=/dev/null", *arguments]
    code, output = _run(argv, folder, GIT_LIMIT_S, {**inherited, **GIT_ENVIRONMENT})
    if code:
        raise ConfigError(f"{problem}: {_last_words(output)}", key="repo")
    return output


def pip(*arguments: str, folder: Path, problem: str) -> None:
    """Run pip with this machine's settings."""
    argv = [sys.executable, *ISOLATED, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    code, output = _run(argv, folder, PIP_LIMIT_S, {**os.environ, "LC_ALL": "C.UTF-8"})
    if code == 0:
        return
    if "No module named pip" in output:
        raise SandboxUnavailable(
            f"pip is not installed for {sys.executable}; install it: {sys.executable} -m ensurepip", kind="pip"
        )
    if "DO NOT MATCH THE HASHES" in output:
        raise ConfigError(f"{problem}: its checksum is not the one that was asked for", key="sha256")
    if any(words in output for words in ("Failed to establish a new connection", "NewConnectionError", "Max retries")):
        raise SandboxFailed(f"{problem}: no network, or the package index does not answer")
    if "No matching distribution" in output:
        raise ConfigError(f"{problem}: {_last_words(output)}", key="repo")
    raise SandboxFailed(f"{problem}: {_last_words(output)}")


def _run(argv: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"it took longer than {timeout_s:g} s"
    return done.returncode, done.stdout.decode(errors="surrogateescape")


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("WARNING")]
    return " / ".join(lines[-6:])[-LAST_WORDS:].encode(errors="replace").decode() or "it said nothing"
