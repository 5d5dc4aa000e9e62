"""A folder, and the editor in it with its history, as an execution server has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from prorl_zmq.tools.editor.arguments import EditorArguments
from prorl_zmq.tools.editor.editing import apply
from prorl_zmq.tools.editor.outcome import EditHistory, EditOutcome

if TYPE_CHECKING:
    from pathlib import Path


class Workspace:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.history = EditHistory(str(root))

    def __call__(self, command: str, path: str = "file", /, **others: Any) -> EditOutcome:
        arguments = msgspec.convert({"command": command, "path": path, **others}, EditorArguments)
        outcome = apply(arguments, self.history.last(path), str(self.root), str(self.root))
        # It crosses a process's end on its way.
        outcome = msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=EditOutcome)
        self.history.record(outcome)
        return outcome

    def done(self, command: str, path: str = "file", /, **others: Any) -> str:
        outcome = self(command, path, **others)
        assert outcome.ok, outcome.text
        return outcome.text

    def refused(self, command: str, path: str = "file", /, **others: Any) -> str:
        before = self.content()
        outcome = self(command, path, **others)
        assert not outcome.ok, outcome.text
        assert outcome.undo is None
        assert self.content() == before
        return outcome.text

    def write(self, content: bytes, path: str = "file") -> Path:
        file = self.root / path
        file.write_bytes(content)
        return file

    def read(self, path: str = "file") -> bytes:
        return (self.root / path).read_bytes()

    def content(self) -> dict[str, bytes | None]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            if path.is_file() and path.stat().st_size < 10**6
            else None
            for path in self.root.rglob("*")
        }


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    root.mkdir()
    return Workspace(root)


@pytest.fixture(scope="module")
def shared_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """One for all examples of a property, each of which writes what it needs."""
    return Workspace(tmp_path_factory.mktemp("workspace"))
