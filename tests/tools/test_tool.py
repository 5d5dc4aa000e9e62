from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from prorl_zmq.tools.tool import Arguments, Tool


class Range(msgspec.Struct):
    first: int
    last: int = -1


class ViewArguments(Arguments, frozen=True):
    """Not for the model."""

    path: Annotated[str, Meta(description="Which file.")]
    lines: Range | None = None


class View(Tool[ViewArguments]):
    name = "view"
    description = "Shows a file."
    takes = ViewArguments

    async def call(self, arguments: ViewArguments, timeout_s: float) -> str:
        return f"{arguments.path} {arguments.lines} {timeout_s:g}"

    async def close(self) -> None:
        pass


def test_the_schema_is_made_from_the_arguments() -> None:
    function = View().schema()["function"]
    assert function["name"] == "view"
    assert function["parameters"]["properties"]["path"] == {"type": "string", "description": "Which file."}
    assert function["parameters"]["required"] == ["path"]
    assert function["parameters"]["additionalProperties"] is False
    assert set(function["parameters"]["$defs"]) == {"Range"}
    assert "Not for the model" not in str(function)


def test_a_call_gets_checked_arguments() -> None:
    text = asyncio.run(View()({"path": "a", "lines": {"first": 2}}, 5))
    assert text == "a Range(first=2, last=-1) 5"
