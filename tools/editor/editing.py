"""`apply`: performs one call of the editor and returns its outcome; it keeps no state.

The outcome reports errors too: for any file system and any arguments the model gets a text that says what to do, and a
refused call leaves the files unchanged. The caller limits the time.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from . import replacement
from .entry import find_entry
from .excerpt import listing, near_miss, snippet, view
from .outcome import EditOutcome, Refused
from .text_file import open_text

if TYPE_CHECKING:
    from .arguments import EditorArguments
    from .entry import DirectoryEntry
    from .outcome import Undo
    from .text_file import Match, TextFile

MATCH_LIMIT = 20
"""Most places of an ambiguous text that the model sees."""
ADVICE = {
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


def apply(arguments: EditorArguments, undo: Undo | None, root: str, directory: str) -> EditOutcome:
    """Perform a call whose paths stay below `root`, relative ones below `directory`.

    `undo` is how to undo the path's last edit, if there was one.
    """
    try:
        with find_entry(arguments.path, root, directory, create=arguments.command == "create") as entry:
            return _apply(entry, arguments, undo)
    except Refused as refused:
        return EditOutcome(arguments.path, str(refused), ok=False)
    except OSError as error:
        about = ADVICE.get(error.errno or 0) or error.strerror or type(error).__name__
        return EditOutcome(arguments.path, f"{arguments.path}: {about}.", ok=False)


def _apply(entry: DirectoryEntry, arguments: EditorArguments, undo: Undo | None) -> EditOutcome:
    if arguments.command == "view":
        return EditOutcome(entry.path, _view(entry, arguments.view_range))
    if arguments.command == "create":
        done = replacement.create(entry, (arguments.file_text or "").encode())
        return EditOutcome(entry.path, f"{entry.path} is created.", undo=done)
    if arguments.command == "undo_edit" and undo is None:
        raise Refused(f"There is no edit of {entry.path} with this tool that could be undone.")
    with open_text(entry, write=True) as file:
        if arguments.command == "str_replace":
            return _str_replace(file, arguments.old_str or "", arguments.new_str or "")
        if arguments.command == "insert":
            return _insert(file, arguments.insert_line or 0, arguments.new_str or "")
        assert undo is not None
        return _undo_edit(file, undo)


def _view(entry: DirectoryEntry, view_range: list[int] | None) -> str:
    if not stat.S_ISDIR(os.stat(entry.name, dir_fd=entry.folder, follow_symlinks=False).st_mode):
        with open_text(entry) as file:
            return view(file, view_range)
    if view_range is not None:
        raise Refused(f"{entry.path} is a directory, which has no lines; leave view_range out.")
    return listing(entry.path, entry.folder, entry.name)


def _str_replace(file: TextFile, wanted: str, instead: str) -> EditOutcome:
    if not (wanted + instead).isascii():
        file.settle_encoding()
    match, old, new = _unique(file, wanted, instead)
    return _edited(file, match.offset, match.line, old, new)


def _unique(file: TextFile, wanted: str, instead: str) -> tuple[Match, bytes, bytes]:
    """Find `wanted`, with the line ends of the file, else with its own; return it and its replacement as bytes.

    Raises:
        Refused: it is not in the file exactly once.
    """
    new = file.encoding.encode(file.translated(instead))
    for text in dict.fromkeys((file.translated(wanted), wanted)):
        old = file.encoding.encode(text)
        matches = file.find(old, MATCH_LIMIT)
        if len(matches) > 1:
            lines = ", ".join(str(line) for line in dict.fromkeys(match.line for match in matches))
            more = " and maybe more" if len(matches) == MATCH_LIMIT else ""
            raise Refused(
                f"Nothing was replaced: old_str is in {file.entry.path} more than once, in lines {lines}{more}. "
                "Take in more of the lines around the one that is meant."
            )
        if matches:
            return matches[0], old, new
    raise Refused(
        f"Nothing was replaced: old_str is not in {file.entry.path}; it must be the same to each character."
        + near_miss(file, wanted)
    )


def _insert(file: TextFile, after_line: int, text: str) -> EditOutcome:
    if not text.isascii():
        file.settle_encoding()
    offset, line = file.line_start(after_line + 1), after_line + 1
    newline = file.encoding.encode(file.translated("\n"))
    new = file.encoding.encode(file.translated(text))
    if after_line and file.data[offset - file.encoding.unit : offset] != file.newline:
        # The last line has no end: it gets one, and the new last line has none.
        new, line = newline + new, after_line
    else:
        new += newline
    return _edited(file, offset, line, b"", new)


def _undo_edit(file: TextFile, undo: Undo) -> EditOutcome:
    path = file.entry.path
    now = replacement.take_back(file, undo)
    if now is None:
        return EditOutcome(path, f"{path}, which the last edit created, is removed again.", undone=True)
    line = 1 + file.newlines(file.start, undo.offset)
    new = file.data[undo.offset : undo.offset + undo.new_bytes]
    shown = snippet(file, undo.offset, line, new, undo.old)
    return EditOutcome(path, f"The last edit of {path} is undone. It reads now:\n{shown}", undone=True, now=now)


def _edited(file: TextFile, offset: int, line: int, old: bytes, new: bytes) -> EditOutcome:
    """Replace `old`, which is at `offset`, and show the result."""
    done = replacement.replace(file, offset, old, new)
    text = f"{file.entry.path} is edited. It reads now:\n{snippet(file, offset, line, old, new)}"
    return EditOutcome(file.entry.path, text, undo=done)
