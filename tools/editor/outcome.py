"""The outcome of an edit, and `EditHistory`, which stores what undoes the edits of each path."""

from __future__ import annotations

import posixpath

import msgspec

EDITS_PER_PATH = 20
HISTORY_LIMIT_BYTES = 8 * 2**20
OVERHEAD_BYTES = 500
"""About what an edit costs besides the text that it replaced; so the limit in bytes bounds the number of edits too."""


class Refused(Exception):
    """Nothing was done; the text is for the model."""


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distinguishes a changed file from an unchanged one without reading it: a digest of 10 GB takes seconds.

    It has no inode number, since some overlay file systems change that.
    """

    size: int
    mtime_ns: int


class Undo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to undo an edit: put `old` in the place of the `new_bytes` bytes at `offset`."""

    offset: int
    old: bytes
    new_bytes: int
    before: Stamp | None
    """The file before the edit; None if the edit created it, so that undoing it removes the file."""
    after: Stamp
    """The file after the edit; an edit whose file has changed since cannot be undone."""


class EditOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    """As the model gave it."""
    text: str
    """For the model."""
    ok: bool = True
    """False if nothing was done; the text says why and what to do."""
    undo: Undo | None = None
    """How to undo it, if it changed a file."""
    undone: bool = False
    """It undid the last edit of the path."""
    now: Stamp | None = None
    """The file after an edit was undone; None if that removed it."""


class EditHistory:
    """The edits of each path that can be undone, in memory; those of the path edited longest ago are dropped first.

    Paths are compared as written, relative ones below `directory`: an edit made through a symbolic link is undone under
    the link's name.
    """

    def __init__(self, directory: str, limit_bytes: int = HISTORY_LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._edits: dict[str, list[Undo]] = {}
        """By path; the path that was edited last comes last."""

    def last(self, path: str) -> Undo | None:
        """Return what undoes the last edit of a path, if there is one."""
        edits = self._edits.get(self._key(path))
        return edits[-1] if edits else None

    def record(self, outcome: EditOutcome) -> None:
        key = self._key(outcome.path)
        edits = self._edits.get(key, [])
        if outcome.undone and edits:
            undone = self._drop(key, -1)
            if edits and outcome.now is not None and edits[-1].after == undone.before:
                # The file has again the content that the edit before left, but is a new file.
                edits[-1] = msgspec.structs.replace(edits[-1], after=outcome.now)
        if outcome.undo is not None:
            self._edits.pop(key, None)
            self._edits[key] = edits
            edits.append(outcome.undo)
            self._size_bytes += len(outcome.undo.old) + OVERHEAD_BYTES
            if len(edits) > EDITS_PER_PATH:
                self._drop(key, 0)
            while self._size_bytes > self._limit_bytes:
                self._drop(next(iter(self._edits)), 0)

    def _drop(self, key: str, number: int) -> Undo:
        undo = self._edits[key].pop(number)
        self._size_bytes -= len(undo.old) + OVERHEAD_BYTES
        if not self._edits[key]:
            del self._edits[key]
        return undo

    def _key(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._directory, path))
