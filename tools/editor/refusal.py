"""`Refused`: the editor does not do something; the text tells the model why, and what it can do."""

from __future__ import annotations

import errno

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


class Refused(Exception):
    """Nothing was done; the text is for the model."""


def explain(path: str, error: OSError) -> str:
    """Say for the model what the system has against an edit, which changed nothing."""
    about = ADVICE.get(error.errno or 0) or error.strerror or type(error).__name__
    return f"{path}: {about}."
