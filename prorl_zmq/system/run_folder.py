"""A service's run folder: made private and marked as one, or refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .unix_peers import way_problem

if TYPE_CHECKING:
    from pathlib import Path

JOURNAL_SUFFIX = ".journal"
"""Journals may be moved to a new folder, with the files that SQLite makes next to them."""
RUN_DIR_MARK = ".prorl-run-dir"
MARK_TEXT = "The run folder of a prorl_zmq service, which removes what it left here: sockets, sandboxes and locks.\n"


def run_dir_problem(path: Path) -> str:
    """Return why a folder that exists cannot be a run folder: it is not ours alone, or has other things in it."""
    try:
        if problem := way_problem(path):
            return problem
        if path.stat().st_uid != os.getuid():
            return f"{path} is root's"
        if (path / RUN_DIR_MARK).is_file():
            return ""
        others = sorted(each.name for each in path.iterdir() if JOURNAL_SUFFIX not in each.name)
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    return f"{path} was not made as one and has other things in it ({', '.join(others[:3])})" if others else ""


def own_run_dir(path: Path) -> Path:
    """Make the run folder, private to this user (0700) and marked as one, and return it.

    Raises:
        ConfigError: it cannot be made, is not this user's alone, or has other things in it: a service removes what an
            earlier one left there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if problem := run_dir_problem(path):
            words = f"{problem}; name an empty or new folder of your own with --run-dir or $PRORL_RUN_DIR"
            raise ConfigError(f"this cannot be the run folder: {words}", key="run_dir")
        path.chmod(0o700)
        if not (path / RUN_DIR_MARK).exists():
            (path / RUN_DIR_MARK).write_text(MARK_TEXT, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the run folder {path} cannot be used: {error.strerror}", key="run_dir") from error
    return path
