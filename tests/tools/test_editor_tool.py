from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.tools.editor.editing import apply
from prorl_zmq.tools.editor_tool import EditorTool
from prorl_zmq.tools.tool import ToolArgumentsInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.tools.editor.arguments import EditorArguments
    from prorl_zmq.tools.editor.outcome import EditOutcome


class FolderEditor:
    """Does edits in a folder, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    async def edit(self, arguments: EditorArguments, timeout_s: float) -> EditOutcome:
        assert timeout_s == 20
        return apply(arguments, None, self.folder, self.folder)


def test_calls(tmp_path: Path) -> None:
    async def main() -> None:
        tool = EditorTool(FolderEditor(tmp_path))
        created = await tool({"command": "create", "path": "a", "file_text": "one\ntwo\n"}, 20)
        assert created == "a is created."
        shown = await tool({"command": "view", "path": "a", "view_range": [2, -1], "old_str": None}, 20)
        assert shown == "a, as cat -n shows it:\n     2\ttwo\n"
        assert "does not exist" in await tool({"command": "view", "path": "b"}, 20)
        await tool.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "missing required field `command`"),
        ({"command": "edit", "path": "a"}, "Invalid enum value 'edit'"),
        ({"command": "view"}, "missing required field `path`"),
        ({"command": "view", "path": ""}, "path is empty"),
        ({"command": "view", "path": "a\0b"}, "NUL"),
        ({"command": "view", "path": "/a/../b"}, "give the plain path, such as '/b'"),
        ({"command": "view", "path": "../b"}, "give an absolute path"),
        ({"command": "view", "path": "a", "view_range": "1-2"}, "Expected `array | null`, got `str`"),
        ({"command": "view", "path": "a", "view_range": [1]}, "must be two numbers"),
        ({"command": "view", "path": "a", "view_range": [1, "2"]}, "Expected `int`, got `str`"),
        ({"command": "view", "path": "a", "view_range": [0, 2]}, "counted from 1"),
        ({"command": "view", "path": "a", "view_range": [3, 2]}, "not before the first"),
        ({"command": "view", "path": "a", "view_range": [3, 2**70]}, "is not the number of a line"),
        ({"command": "create", "path": "a"}, "create needs file_text"),
        ({"command": "create", "path": "a", "file_text": "ab\ud800"}, "surrogate pair at character 2"),
        ({"command": "str_replace", "path": "a", "new_str": "b"}, "str_replace needs old_str"),
        ({"command": "str_replace", "path": "a", "old_str": ""}, "old_str is empty"),
        ({"command": "str_replace", "path": "a", "old_str": "b", "new_str": "b"}, "nothing to replace"),
        ({"command": "insert", "path": "a"}, "insert needs insert_line and new_str"),
        ({"command": "insert", "path": "a", "insert_line": -1, "new_str": "b"}, "insert_line is -1"),
        ({"command": "insert", "path": "a", "insert_line": "1", "new_str": "b"}, "Expected `int | null`, got `str`"),
        ({"command": "view", "path": "a", "line": 1}, "unknown field `line`"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolArgumentsInvalid, match="wrong arguments for str_replace_editor") as caught:
        EditorTool(FolderEditor(tmp_path)).check(arguments)
    assert said in str(caught.value)
    assert str(caught.value).endswith(
        'it takes {"command": "create" | "insert" | "str_replace" | "undo_edit" | "view", "path": string, '
        '"view_range"?: [integer, …], "file_text"?: string, "old_str"?: string, "new_str"?: string, '
        '"insert_line"?: integer}'
    )


def test_the_schema_is_plain(tmp_path: Path) -> None:
    parameters = EditorTool(FolderEditor(tmp_path)).parameters
    assert parameters["required"] == ["command", "path"]
    for name, about in parameters["properties"].items():
        assert about["type"] in ("string", "integer", "array"), name
        assert about["description"]
        assert not {"anyOf", "default"} & set(about)
    assert parameters["properties"]["view_range"]["items"] == {"type": "integer"}
