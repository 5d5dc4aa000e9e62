"""Convert the tools of OpenAI's Responses to plain functions and back.

Functions of a `namespace` get its name as prefix. `custom` tools, which take free text, become functions with one
argument. Tools that OpenAI would run itself (such as `web_search`) are not offered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from .fields import arguments_object, function_tool

if TYPE_CHECKING:
    from collections.abc import Sequence

_FREE_TEXT: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Tool(msgspec.Struct):
    """A tool as a request has it."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Any = None
    tools: list[Tool] | None = None


class ToolName(NamedTuple):
    """What the API calls a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolNames:
    """The functions that a request's tools became."""

    functions: tuple[dict[str, Any], ...] = ()
    names: dict[str, ToolName] = field(default_factory=dict)
    """By the function's name."""

    def called(self, function: str) -> ToolName:
        """Return what a call of the policy is a call of; a name that was not offered goes out as it is."""
        return self.names.get(function) or ToolName(function)

    def function(self, name: str, namespace: str | None) -> str:
        """Return what the policy knows a tool as, whether or not this request offers it."""
        offered = (known for known, tool in self.names.items() if (tool.name, tool.namespace) == (name, namespace))
        return next(offered, _flat(name, namespace))


def tool_names(tools: Sequence[Tool]) -> ToolNames:
    """Make functions of tools, each with a name of its own."""
    functions, names = [], {}
    flat: list[tuple[Tool, str | None]] = [(tool, None) for tool in tools if tool.type != "namespace"]
    flat += [(tool, space.name) for space in tools if space.type == "namespace" for tool in space.tools or ()]
    for tool, namespace in flat:
        if tool.type not in {"function", "custom"} or not tool.name:
            continue
        custom = tool.type == "custom"
        name = _flat(tool.name, namespace)
        while name in names:
            name += "_"
        names[name] = ToolName(tool.name, namespace, custom)
        functions.append(function_tool(name, tool.description, _FREE_TEXT if custom else tool.parameters))
    return ToolNames(tuple(functions), names)


def free_text(arguments: str) -> str:
    """Return what a call of a custom tool gives it; text that is not the function's argument goes in whole."""
    given = arguments_object(arguments).get("input")
    return given if isinstance(given, str) else arguments


def _flat(name: str, namespace: str | None) -> str:
    return f"{namespace.rstrip('_')}__{name}" if namespace else name
