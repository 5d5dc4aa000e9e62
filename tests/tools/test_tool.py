from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from prorl_zmq.tools.tool import Arguments, Tool, ToolArgumentsInvalid


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


@pytest.mark.parametrize("returned", [None, {"a": 1}, b"text"])
def test_a_call_that_returns_no_text_names_the_tool(returned: Any) -> None:
    class Wrong(View):
        async def call(self, arguments: ViewArguments, timeout_s: float) -> str:
            return returned  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match=re.escape(f"the tool view: call returned {returned!r}; it must return a text")):
        asyncio.run(Wrong()({"path": "a"}, 5))


def test_a_call_that_is_no_coroutine_names_the_tool() -> None:
    class Wrong(View):
        def call(self, arguments: ViewArguments, timeout_s: float) -> str:  # type: ignore[override]
            return "text"

    with pytest.raises(TypeError, match="the tool view: call must be a coroutine; write `async def call"):
        asyncio.run(Wrong()({"path": "a"}, 5))


class Many(Arguments, frozen=True):
    first: Literal["a", "b"]
    second: list[int] | None = None
    third: int | str = 3
    fourth: int | str | None = None
    fifth: tuple[Range, ...] = ()
    sixth: dict[str, int] = msgspec.field(default_factory=dict)
    seventh: Tree | None = None


class Tree(msgspec.Struct):
    below: list[Tree] = []


class Takes(Tool[Many]):
    name = "many"
    description = "Takes much."
    takes = Many

    async def call(self, arguments: Many, timeout_s: float) -> str:
        return str(arguments)

    async def close(self) -> None:
        pass


def test_arguments_that_may_be_left_out_are_shown_without_null() -> None:
    properties = Takes().parameters["properties"]
    assert properties["first"] == {"type": "string", "enum": ["a", "b"]}
    assert properties["second"] == {"type": "array", "items": {"type": "integer"}}
    assert properties["third"] == {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 3}
    assert properties["fourth"] == {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert properties["seventh"] == {"$ref": "#/$defs/Tree"}
    assert Takes().check({"first": "a", "second": None}) == Many("a")


def test_wrong_arguments_are_told_with_what_the_tool_takes() -> None:
    with pytest.raises(ToolArgumentsInvalid) as caught:
        Takes().check({"first": "a", "fifth": [{"first": "x"}]})
    assert str(caught.value) == (
        "wrong arguments for many: Expected `int`, got `str` - at `$.fifth[0].first`; it takes "
        '{"first": "a" | "b", "second"?: [integer, …], "third"?: integer | string, "fourth"?: integer | string, '
        '"fifth"?: [{"first": integer, "last"?: integer}, …], "sixth"?: object, '
        '"seventh"?: {"below"?: [{"below"?: [{"below"?: […, …]}, …]}, …]}}'
    )


def test_half_a_surrogate_pair_in_arguments_is_the_models_to_put_right() -> None:
    with pytest.raises(ToolArgumentsInvalid, match="surrogates not allowed"):
        View().check({"\ud800": 1})
