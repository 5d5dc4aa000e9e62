"""The editor as the model sees it; the job's execution server performs the edits, where the files are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .editor.arguments import EditorArguments
from .tool import Tool

if TYPE_CHECKING:
    from .editor.outcome import EditOutcome


class Editor(Protocol):
    async def edit(self, arguments: EditorArguments, timeout_s: float) -> EditOutcome:
        """Perform one call of the editor; raise `ProrlError` if the sandbox is lost."""


class EditorTool(Tool[EditorArguments]):
    name = "str_replace_editor"
    description = (
        "Views, creates and edits text files. view shows a file with numbered lines, or what is in a directory two "
        "levels deep. create makes a new file with file_text, and the directories that lead to it; it overwrites "
        "nothing. str_replace puts new_str in the place of old_str, which must be in the file exactly once: give it "
        "character by character, without line numbers, and with enough of the lines around it. insert puts the lines "
        "of new_str after line insert_line. undo_edit takes back the last edit of the path. Encoding and line ends of "
        "a file are kept."
    )
    takes = EditorArguments

    def __init__(self, editor: Editor) -> None:
        self._editor = editor

    async def call(self, arguments: EditorArguments, timeout_s: float) -> str:
        return (await self._editor.edit(arguments, timeout_s)).text
