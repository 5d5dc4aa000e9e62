"""`apply`: performs one call of the editor and returns its outcome; it keeps no state.

Errors are part of the outcome: for any file system and any arguments the model gets a text that says what to do, and a
refused call leaves the files unchanged. The caller limits the time.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from . import replacement
from .entry import find_entry
from .excerpt import listing, near_miss, snippet, view
from .outcome import EditOutcome, Refused, explain
from .text_file import open_text

if TYPE_CHECKING:
    from .arguments import EditorArguments
    from .entry import DirectoryEntry
    from .outcome import Undo
    from .text_file import Match, TextFile

MATCH_LIMIT = 20
"""Most places of a text that is not unique that the model sees."""


def apply(arguments: EditorArguments, undo: Undo | None, root: str, directory: str) -> EditOutcome:
    try:
        with find_entry(arguments.path, root, directory, create=arguments.command == "create") as entry:
            return _apply(entry, arguments, undo)
    except Refused as refused:
        return EditOutcome(arguments.path, str(refused), ok=False)
    except OSError as error:
        return EditOutcome(arguments.path, explain(arguments.path, error), ok=False)


def _apply(entry: DirectoryEntry, arguments: EditorArguments, undo: Undo | None) -> EditOutcome:
    match arguments.command:
        case "view":
            return _view(entry, arguments)
        case "create":
            return _create(entry, arguments.file_text or "")
        case "str_replace":
            with open_text(entry, write=True) as file:
                return _str_replace(file, arguments.old_str or "", arguments.new_str or "")
        case "insert":
            with open_text(entry, write=True) as file:
                return _insert(file, arguments.insert_line or 0, arguments.new_str or "")
        case "undo_edit":
            if undo is None:
                raise Refused(f"There is no edit of {entry.path} with this tool that could be undone.")
            with open_text(entry, write=True) as file:
                return _undo_edit(file, undo)


def _view(entry: DirectoryEntry, arguments: EditorArguments) -> EditOutcome:
    mode = os.stat(entry.name, dir_fd=entry.folder, follow_symlinks=False).st_mode
    if not stat.S_ISDIR(mode):
        with open_text(entry) as file:
            return EditOutcome(entry.path, view(file, arguments.view_range))
    if arguments.view_range is not None:
        raise Refused(f"{entry.path} is a directory, which has no lines; leave view_range out.")
    return EditOutcome(entry.path, listing(entry.path, entry.folder, entry.name))


def _create(entry: DirectoryEntry, content: str) -> EditOutcome:
    done = replacement.create(entry, content.encode())
    return EditOutcome(entry.path, f"{entry.path} is created.", undo=done)


def _str_replace(file: TextFile, wanted: str, instead: str) -> EditOutcome:
    if not (wanted + instead).isascii():
        file.settle_encoding()
    match, old, new = _unique(file, wanted, instead)
    done = replacement.replace(file, match.offset, old, new)
    return EditOutcome(file.entry.path, _edited(file, match.offset, match.line, old, new), undo=done)


def _unique(file: TextFile, wanted: str, instead: str) -> tuple[Match, bytes, bytes]:
    """Find `wanted`, with the line ends of the file, else with its own; return it and its replacement as bytes.

    Raises:
        Refused: it is not there exactly once.
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
    if after_line and file.read(offset - file.encoding.unit, file.encoding.unit) != file.encoding.newline:
        # The last line has no end. It gets one, and the new last line has none.
        new, line = newline + new, after_line
    else:
        new += newline
    done = replacement.replace(file, offset, b"", new)
    return EditOutcome(file.entry.path, _edited(file, offset, line, b"", new), undo=done)


def _undo_edit(file: TextFile, undo: Undo) -> EditOutcome:
    path = file.entry.path
    now = replacement.take_back(file, undo)
    if now is None:
        return EditOutcome(path, f"{path}, which the last edit created, is removed again.", undone=True)
    line = file.line_of(undo.offset)
    new = file.read(undo.offset, undo.new_bytes)
    shown = snippet(file, undo.offset, line, new, undo.old)
    return EditOutcome(path, f"The last edit of {path} is undone. It reads now:\n{shown}", undone=True, now=now)


def _edited(file: TextFile, offset: int, line: int, old: bytes, new: bytes) -> str:
    return f"{file.entry.path} is edited. It reads now:\n{snippet(file, offset, line, old, new)}"
