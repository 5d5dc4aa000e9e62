"""What comes of an edit: the text for the model, and the little that is needed to undo it; or why it is refused."""

from __future__ import annotations

import errno

import msgspec

ADVICE: dict[int, str] = {
    errno.ENOENT: "it does not exist; view its directory to see what is there",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.EACCES: "you have no permission for this; look at it with ls -l",
    errno.EPERM: "you have no permission for this; look at it with ls -l",
    errno.EROFS: "it is on a file system that cannot be written; work on a copy elsewhere",
    errno.ENOSPC: "the disk is full; remove what is not needed and try again",
    errno.EDQUOT: "the disk quota is used up; remove what is not needed and try again",
    errno.EFBIG: "the file would become larger than is allowed here",
    errno.EEXIST: "it exists already; change it with str_replace or insert",
    errno.ENAMETOOLONG: "the path is too long",
    errno.ELOOP: "it leads through too many symbolic links, perhaps in a circle",
    errno.EBUSY: "it is a mount point and cannot be replaced; write it with a bash command",
    errno.ETXTBSY: "it is a program that is running",
}


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


class Refused(Exception):
    """Nothing was done; the text is for the model."""


def explain(path: str, error: OSError) -> str:
    """Say for the model what the system has against an edit, which changed nothing."""
    about = ADVICE.get(error.errno or 0) or error.strerror or type(error).__name__
    return f"{path}: {about}."
