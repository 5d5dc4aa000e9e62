"""`EditHistory`: the edits of each path that can be undone, newest first.

It has no I/O and lives as long as its execution server. It is limited in number and in bytes; the edits of the path
that was edited longest ago are dropped first. A path is compared as it is written, relative ones after joining them to
the working directory: an edit made through a symbolic link is undone under the link's name.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .outcome import EditOutcome, Undo

EDITS_PER_PATH = 20
HISTORY_LIMIT_BYTES = 8 * 2**20
OVERHEAD_BYTES = 500
"""What an edit costs besides the text that it replaced, about; so the limit in bytes bounds the number of edits too."""


class EditHistory:
    def __init__(self, directory: str, limit_bytes: int = HISTORY_LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._edits: dict[str, list[Undo]] = {}
        """By path; the path that was edited last comes last."""

    def last(self, path: str) -> Undo | None:
        """Return what takes back the last edit of a path, if there is one."""
        edits = self._edits.get(self._key(path))
        return edits[-1] if edits else None

    def record(self, outcome: EditOutcome) -> None:
        key = self._key(outcome.path)
        if outcome.undone:
            self._take_back(key, outcome)
        if outcome.undo is not None:
            edits = self._edits.pop(key, [])
            self._edits[key] = edits
            edits.append(outcome.undo)
            self._size_bytes += _size_bytes(outcome.undo)
            if len(edits) > EDITS_PER_PATH:
                self._forget(key)
            while self._size_bytes > self._limit_bytes:
                self._forget(next(iter(self._edits)))

    def _take_back(self, key: str, outcome: EditOutcome) -> None:
        edits = self._edits.get(key)
        if not edits:
            return
        undone = edits.pop()
        self._size_bytes -= _size_bytes(undone)
        if not edits:
            del self._edits[key]
        elif outcome.now is not None and edits[-1].after == undone.before:
            # The file is again what the edit before left, but in a new file.
            edits[-1] = msgspec.structs.replace(edits[-1], after=outcome.now)

    def _forget(self, key: str) -> None:
        edits = self._edits[key]
        self._size_bytes -= _size_bytes(edits.pop(0))
        if not edits:
            del self._edits[key]

    def _key(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._directory, path))


def _size_bytes(undo: Undo) -> int:
    return len(undo.old) + OVERHEAD_BYTES
