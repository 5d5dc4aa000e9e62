"""Writes Harbor task folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TOML = 'schema_version = "1.4"\n'
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\n"


def make_task(folder: Path, toml: str = "", files: dict[str, str | None] | None = None) -> Path:
    """Write a task folder; `files` adds files to the usual ones, replaces them, or, with None, leaves them out."""
    usual: dict[str, str | None] = {
        "task.toml": TOML + toml,
        "instruction.md": "Write hello into /app/hello.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": "#!/bin/sh\ngrep -q hello /app/hello.txt && echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\necho hello > /app/hello.txt\n",
    }
    for name, content in {**usual, **(files or {})}.items():
        if content is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
    return folder
