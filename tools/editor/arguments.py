"""The editor's arguments: one Struct for all its commands, and which arguments each command requires."""

from __future__ import annotations

import posixpath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Command = Literal["view", "create", "str_replace", "insert", "undo_edit"]

NEEDED: dict[Command, tuple[str, ...]] = {
    "view": (),
    "create": ("file_text",),
    "str_replace": ("old_str",),
    "insert": ("insert_line", "new_str"),
    "undo_edit": (),
}
"""The arguments that each command requires, besides the path."""
LINE_LIMIT = 2**53
"""Largest number of a line; larger ones do not fit into a message."""


class EditorArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of the editor.

    Raises:
        ValueError: an argument is missing or invalid; the message says what the model must change.
    """

    command: Annotated[Command, Meta(description="What to do.")]
    path: Annotated[
        str, Meta(description="File or directory: an absolute path, or one relative to the working directory.")
    ]
    view_range: Annotated[
        list[int] | None,
        Meta(description="For view of a file: first and last line, counted from 1; [10, -1] is line 10 to the end."),
    ] = None
    file_text: Annotated[str | None, Meta(description="For create: the content of the new file.")] = None
    old_str: Annotated[
        str | None, Meta(description="For str_replace: the text to replace; it must be in the file exactly once.")
    ] = None
    new_str: Annotated[
        str | None,
        Meta(description="For str_replace: the text instead, nothing if left out. For insert: the lines to insert."),
    ] = None
    insert_line: Annotated[
        int | None, Meta(description="For insert: the line after which new_str goes; 0 is the start of the file.")
    ] = None

    def __post_init__(self) -> None:
        for name in ("path", "file_text", "old_str", "new_str"):
            _check_encodable(name, getattr(self, name))
        _check_path(self.path)
        for number in (self.insert_line or 0, *(self.view_range or ())):
            if abs(number) > LINE_LIMIT:
                raise ValueError(f"{number} is not the number of a line")
        missing = [name for name in NEEDED[self.command] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{self.command} needs {' and '.join(missing)}")
        if self.command == "view":
            _check_range(self.view_range)
        elif self.command == "insert" and (self.insert_line or 0) < 0:
            raise ValueError(f"insert_line is {self.insert_line}; it must be 0 or the number of a line")
        elif self.command == "str_replace":
            if not self.old_str:
                raise ValueError("old_str is empty; to add text use insert, to make a new file use create")
            if self.old_str == self.new_str:
                raise ValueError("old_str and new_str are the same, so there is nothing to replace")


def _check_encodable(name: str, text: str | None) -> None:
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half of a surrogate pair at character {error.start}, which no file can hold; "
            "write the whole character"
        ) from None


def _check_path(path: str) -> None:
    if not path or "\0" in path:
        raise ValueError("path is empty or has a NUL in it; give the path of a file or directory")
    if ".." in path.split("/"):
        plain = posixpath.normpath(path)
        advice = "give an absolute path" if plain.startswith("..") else f"give the plain path, such as {plain!r}"
        raise ValueError(f"the path {path!r} has '..' in it; {advice}")


def _check_range(view_range: list[int] | None) -> None:
    if view_range is None:
        return
    if len(view_range) != 2:
        raise ValueError(f"view_range is {view_range}; it must be two numbers, the first and the last line")
    first, last = view_range
    if first < 1 or (last < first and last != -1):
        raise ValueError(
            f"view_range is {view_range}; lines are counted from 1, and the last is -1 or not before the first"
        )
