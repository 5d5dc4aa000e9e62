"""What is in a directory, two levels deep, as the model reads it: hidden entries left out, links not followed."""

from __future__ import annotations

import os
from itertools import islice

ENTRY_LIMIT = 1000
"""Most entries that are listed."""
SCAN_LIMIT = 20_000
"""Most entries of one directory that are looked at, and so sorted."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def listing(path: str, folder: int, name: bytes) -> str:
    """List the directory `name` in `folder`.

    Raises:
        OSError: it is no directory, or may not be read.
    """
    top = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    try:
        rows, hidden = _entries(top, path.rstrip("/") + "/", levels=2)
    finally:
        os.close(top)
    notes = [f"[{hidden} hidden entries of {path} are not shown]"] if hidden else []
    if len(rows) > ENTRY_LIMIT:
        notes.append(f"[only the first {ENTRY_LIMIT} entries are shown; see more with view of a directory in it]")
    return "\n".join([f"{path} and what is in it, two levels deep:", *rows[:ENTRY_LIMIT], *notes, ""])


def _entries(folder: int, prefix: str, levels: int) -> tuple[list[str], int]:
    with os.scandir(folder) as found:
        entries = sorted(islice(found, SCAN_LIMIT), key=lambda entry: entry.name)
    shown = [entry for entry in entries if not entry.name.startswith(".")]
    rows: list[str] = []
    for entry in shown[: ENTRY_LIMIT + 1]:
        # A name need not be text; what is shown must be.
        row = prefix + os.fsencode(entry.name).decode(errors="replace")
        if entry.is_symlink():
            rows.append(f"{row} (a symbolic link)")
        elif not entry.is_dir(follow_symlinks=False):
            rows.append(row)
        else:
            rows.append(f"{row}/")
            if levels > 1:
                rows += _below(folder, entry.name, f"{row}/", levels - 1)
        if len(rows) > ENTRY_LIMIT:
            break
    return rows, len(entries) - len(shown)


def _below(folder: int, name: str, prefix: str, levels: int) -> list[str]:
    try:
        inner = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    except OSError as error:
        return [f"{prefix} ({error.strerror})"]
    try:
        return _entries(inner, prefix, levels)[0]
    finally:
        os.close(inner)
