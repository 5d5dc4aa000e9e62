"""Excerpts for the model: numbered lines of a text file, as `cat -n` prints them, and listings of directories.

Each excerpt has a limit and states what it omits.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from .text_file import LATIN_1, UTF_8, is_latin_1

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .text_file import Encoding, TextFile

VIEW_LIMIT = 64 * 1024
"""Most characters of one view."""
SNIPPET_LIMIT = 8 * 1024
"""Most characters that show an edit."""
SNIPPET_LINES = 4
"""Lines shown before and after an edit."""
COUNT_LIMIT_BYTES = 16 * 2**20
"""Largest file whose lines are counted for the model."""
SEARCH_LIMIT_BYTES = 2**20
"""Largest file that is searched for near misses."""
WORD_LIMIT = 2000
"""Most words of a text that is searched for with other whitespace."""
ENTRY_LIMIT = 1000
"""Most entries that are listed."""
SCAN_LIMIT = 20_000
"""Most entries of one directory that are read and sorted."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NUMBERED = re.compile(r"^ *\d+\t", re.MULTILINE)


class Rows(NamedTuple):
    text: str
    following: int
    """The first line that is not shown."""
    cut: bool
    """The last line shown is too long to be shown whole."""


def number(lines: Sequence[str], first: int, limit: int) -> Rows:
    """Number as many lines as fit into `limit` characters: whole ones, or the beginning of the first."""
    rows: list[str] = []
    room = limit
    for line, text in enumerate(lines, first):
        row = f"{line:6}\t{text.removesuffix(chr(13))}\n"
        room -= len(row)
        if room < 0:
            cut = not rows
            return Rows("".join(rows) or row[:limit] + "\n", line + cut, cut)
        rows.append(row)
    return Rows("".join(rows), first + len(lines), cut=False)


def view(file: TextFile, view_range: Sequence[int] | None) -> str:
    """Show a range of lines, or the whole file as far as it fits.

    Raises:
        Refused: the range begins after the end of the file, or a part of it is not text.
    """
    first, last = view_range or (1, -1)
    path = file.entry.path
    offset = file.line_start(first)
    limit_bytes = VIEW_LIMIT * file.encoding.unit
    data = file.data[offset : offset + limit_bytes + file.encoding.unit]
    if not data:
        if first == 1:
            return f"{path} is empty."
        raise file.no_line_after(first - 1)
    at_end = len(data) <= limit_bytes
    encoding = _shown_as(file, data, at_end=at_end)
    available = encoding.decode(data).split("\n")
    # What follows the last line end is an incomplete line; it is shown only if it is the first.
    partial = len(available) == 1 and not at_end
    if len(available) > 1 and not (at_end and available[-1]):
        available.pop()
    rows = number(available if last == -1 else available[: last - first + 1], first, VIEW_LIMIT)
    cut = rows.cut or partial
    text = f"{path}, as cat -n shows it:\n{rows.text}"
    if "\N{REPLACEMENT CHARACTER}" in rows.text:
        text += f"[\N{REPLACEMENT CHARACTER} stands for bytes that are not {encoding.name}; edits keep them]\n"
    ended = at_end and rows.following == first + len(available)
    if not cut and (ended if last == -1 else rows.following > last):
        return text
    notes = []
    if cut:
        notes.append(f"line {rows.following - 1} is cut, as it is too long to be shown whole; see more of it with bash")
    if not ended:
        notes.append(f"see more with view_range [{rows.following}, {rows.following + 199}]")
    size = file.stamp.size
    notes.append(f"the file has {f'{size} bytes' if size > COUNT_LIMIT_BYTES else f'{file.line_count()} lines'}")
    return f"{text}[{'; '.join(notes)}]\n"


def snippet(file: TextFile, offset: int, line: int, old: bytes, new: bytes) -> str:
    """Show the lines around an edit that puts `new` in the place of `old`; `file` is as it was before."""
    reach = SNIPPET_LIMIT * file.encoding.unit
    begin, end = max(file.start, offset - reach), offset + len(old)
    before, after = file.data[begin:offset], file.data[end : end + reach]
    at_end = len(after) < reach
    encoding = _shown_as(file, before + new + after, at_end=at_end)
    head = encoding.decode(before).split("\n")
    if begin > file.start and len(head) > 1:
        head = head[1:]  # a piece of a line
    head = head[-SNIPPET_LINES - 1 :]
    changed = encoding.decode(new)
    lines = ("\n".join(head) + changed + encoding.decode(after)).split("\n")
    if len(lines) > len(head) and not (at_end and lines[-1]):
        lines.pop()
    last = len(head) + changed.count("\n") + SNIPPET_LINES
    rows = number(lines[:last], line - len(head) + 1, SNIPPET_LIMIT)
    return rows.text if not rows.cut and rows.following > line + changed.count("\n") else f"{rows.text}[cut here]\n"


def near_miss(file: TextFile, wanted: str) -> str:
    """Describe what nearly matches a missing text: it without view's line numbers, or with other whitespace."""
    if file.stamp.size > SEARCH_LIMIT_BYTES:
        return ""
    text = file.encoding.decode(file.data[file.start :]).replace("\r\n", "\n")
    plain = NUMBERED.sub("", wanted)
    if plain.strip() and plain != wanted and plain in text:
        return " It is there without the line numbers that view puts before each line: leave them out."
    words = wanted.split()
    if not 0 < len(words) <= WORD_LIMIT:
        return ""
    match = re.search(r"\s+".join(map(re.escape, words)), text)
    if match is None:
        return ""
    first = text.count("\n", 0, match.start()) + 1
    last = text.count("\n", 0, match.end()) + 1
    rows = number(text.split("\n")[first - 1 : last], first, SNIPPET_LIMIT)
    return f" This differs from it in whitespace only:\n{rows.text}"


def listing(path: str, folder: int, name: bytes) -> str:
    """List the directory `name` in `folder`, two levels deep, without hidden entries; follow no links.

    Raises:
        OSError: it is not a directory, or may not be read.
    """
    rows, hidden = _entries(folder, name, path.rstrip("/") + "/", levels=2)
    notes = [f"[{hidden} hidden entries of {path} are not shown]"] if hidden else []
    if len(rows) > ENTRY_LIMIT:
        notes.append(f"[only the first {ENTRY_LIMIT} entries are shown; see more with view of a directory in it]")
    return "\n".join([f"{path} and what is in it, two levels deep:", *rows[:ENTRY_LIMIT], *notes, ""])


def _shown_as(file: TextFile, data: bytes, *, at_end: bool) -> Encoding:
    """Return the encoding in which a piece is shown: what the BOM says, else what fits."""
    return LATIN_1 if file.encoding is UTF_8 and is_latin_1(data, at_end=at_end) else file.encoding


def _entries(parent: int, name: bytes, prefix: str, levels: int) -> tuple[list[str], int]:
    """Return a row for each entry of a directory, and how many are hidden."""
    folder = os.open(name, FOLDER_FLAGS, dir_fd=parent)
    try:
        with os.scandir(folder) as found:
            entries = sorted(islice(found, SCAN_LIMIT), key=lambda entry: entry.name)
        shown = [entry for entry in entries if not entry.name.startswith(".")]
        rows: list[str] = []
        for entry in shown[: ENTRY_LIMIT + 1]:
            # A name need not be text; a row must be.
            row = prefix + os.fsencode(entry.name).decode(errors="replace")
            if entry.is_symlink():
                rows.append(f"{row} (a symbolic link)")
            elif not entry.is_dir(follow_symlinks=False):
                rows.append(row)
            else:
                rows.append(f"{row}/")
                if levels > 1:
                    try:
                        rows += _entries(folder, os.fsencode(entry.name), f"{row}/", levels - 1)[0]
                    except OSError as error:
                        rows.append(f"{row}/ ({error.strerror})")
            if len(rows) > ENTRY_LIMIT:
                break
        return rows, len(entries) - len(shown)
    finally:
        os.close(folder)
