"""A sandbox kind of another package, as its entry point makes it known to processes that are started from now on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PACKAGE = '''
from pathlib import Path

from prorl_zmq.tools.kinds.process import ProcessContainer

class MarkedContainer(ProcessContainer):
    """Plain processes; the folder `marks` beside the sandboxes' folder tells how many were started."""

    kind = "marked"

    async def start(self):
        await super().start()
        marks = Path(__file__).with_name("marks")
        marks.mkdir(exist_ok=True)
        (marks / self.path.name).touch()

    @classmethod
    def version(cls):
        return "one of my own"

class Broken(ProcessContainer):
    kind = "broken"

    @classmethod
    def problem(cls):
        return "the machine lacks a wheel; mount one"

class Crashing(ProcessContainer):
    kind = "crashing"

    @classmethod
    def problem(cls):
        raise RuntimeError("no wheel")

class NoKind:
    kind = "none"
'''


def register(folder: Path, monkeypatch: pytest.MonkeyPatch, **kinds: str) -> Path:
    """Make the entry points of kinds visible to child processes; return the package's folder."""
    (folder / "my_sandbox.py").write_text(PACKAGE)
    info = folder / "my_sandbox-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-sandbox\nVersion: 1\n")
    lines = "".join(f"{name} = {target}\n" for name, target in kinds.items())
    (info / "entry_points.txt").write_text(f"[prorl_zmq.sandboxes]\n{lines}")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder
