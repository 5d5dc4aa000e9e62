"""What comes of an edit: the text for the model, and the little that is needed to undo it."""

from __future__ import annotations

import msgspec


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What tells a file that was changed from one that was not, without reading it: a digest of 10 GB takes seconds.

    The number of its inode is no part of it, since not all overlay file systems keep that.
    """

    size: int
    mtime_ns: int


class Undo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to take an edit back: put `old` in the place of the `new_bytes` bytes at `offset`."""

    offset: int
    old: bytes
    new_bytes: int
    before: Stamp | None
    """The file before the edit; None if the edit created it, so that taking it back removes the file."""
    after: Stamp
    """The file after the edit; if it is another now, something else changed it and the edit cannot be taken back."""


class EditOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of one call of the editor."""

    path: str
    """As the model gave it."""
    text: str
    """For the model."""
    ok: bool = True
    """False if nothing was done; the text says why and what to do."""
    undo: Undo | None = None
    """How to take back what was done, if it changed a file."""
    undone: bool = False
    """The last edit of the path was taken back."""
    now: Stamp | None = None
    """The file after an edit was taken back; None if that removed it."""
