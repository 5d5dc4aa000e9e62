"""A tool: a function that the policy calls by name with checked arguments, and that returns a text.

A tool declares its arguments as a msgspec Struct, from which come the JSON schema that the model sees and the check of
the model's arguments. A wrong argument is an error whose text addresses the model, which can correct it; all other
errors belong to the service.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from inspect import isawaitable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of tools' arguments; `Annotated[…, Meta(description=…)]` on a field describes it to the model."""


A = TypeVar("A", bound=msgspec.Struct)

REFERENCE = "#/$defs/"
USAGE_DEPTH = 3
"""How many levels of nested arguments are spelt out for a model that got them wrong."""


class ToolArgumentsInvalid(ValueError):
    """The model called a tool with invalid arguments; the text says what to change."""


class AnyTool(ABC):
    """A tool, as the agent loop uses it. The caller that makes a tool closes it."""

    name: str
    """What the model calls."""
    ends_episode: ClassVar[bool] = False
    """A call that succeeds ends the episode, and its text is the episode's `final_message`."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Describe the tool as OpenAI's function calling and the Hermes chat templates do."""

    @abstractmethod
    async def __call__(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call the tool; return the text for the model.

        Args:
            arguments: as the model wrote them, parsed from JSON.
            timeout_s: the call ends soon after that, with a text that says so.

        Raises:
            ToolArgumentsInvalid: the arguments are not what the tool takes; nothing was done.
            ProrlError: the tool's session or sandbox is lost.
        """

    async def close(self) -> None:  # noqa: B027 - most tools hold nothing
        """End what the tool holds; may be called again."""


class Tool(AnyTool, Generic[A]):
    """Base of tools that declare their arguments as a Struct."""

    description: ClassVar[str]
    """What the model reads about it."""
    takes: type[A]
    """The arguments."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments as a JSON schema of an object."""
        (_,), components = msgspec.json.schema_components((self.takes,), ref_template=REFERENCE + "{name}")
        schema = dict(components.pop(self.takes.__name__))
        # The model needs neither; they are the words of this code for other code.
        schema.pop("title", None)
        schema.pop("description", None)
        schema["properties"] = {name: _for_model(about) for name, about in schema["properties"].items()}
        return {**schema, "$defs": components} if components else schema

    def schema(self) -> dict[str, Any]:
        return function_schema(self.name, self.description, self.parameters)

    async def __call__(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Check the arguments and call `call`; a `TypeError` if that is not as `Tool` declares it."""
        calling = self.call(self.check(arguments), timeout_s)
        if not isawaitable(calling):
            raise TypeError(f"the tool {self.name}: call must be a coroutine; write `async def call(…)`")
        text: Any = await calling
        if not isinstance(text, str):
            raise TypeError(f"the tool {self.name}: call returned {text!r:.100}; it must return a text for the model")
        return text

    def check(self, arguments: dict[str, Any]) -> A:
        """Return the arguments as the tool's Struct, or raise `ToolArgumentsInvalid`."""
        try:
            return msgspec.convert(arguments, self.takes)
        except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
            raise ToolArgumentsInvalid(f"wrong arguments for {self.name}: {error}; it takes {self._usage()}") from error

    @abstractmethod
    async def call(self, arguments: A, timeout_s: float) -> str:
        """Do the work; see `__call__`."""

    def _usage(self) -> str:
        schema = self.parameters
        return _words(schema, schema.get("$defs", {}))


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return what `AnyTool.schema` returns."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _for_model(about: dict[str, Any]) -> dict[str, Any]:
    """Describe an argument as chat templates expect it.

    The null of an omitted argument is removed, since models would write it; each choice of texts gets the type of text.
    """
    if "enum" in about and all(isinstance(value, str) for value in about["enum"]):
        return {"type": "string", **about}
    if about.get("default", ...) is not None:
        return about
    plain = {key: value for key, value in about.items() if key not in ("anyOf", "default")}
    kinds = [_for_model(kind) for kind in about.get("anyOf", ()) if kind != {"type": "null"}]
    return {**plain, **kinds[0]} if len(kinds) == 1 else {**plain, "anyOf": kinds}


def _words(about: dict[str, Any], components: dict[str, Any], depth: int = 0) -> str:
    """Write a JSON schema in few words, such as `{"path": string, "lines"?: [integer, …]}`."""
    if "$ref" in about and depth < USAGE_DEPTH:
        return _words(components[about["$ref"].removeprefix(REFERENCE)], components, depth + 1)
    if "enum" in about:
        return " | ".join(msgspec.json.encode(value).decode() for value in about["enum"])
    if "anyOf" in about:
        return " | ".join(_words(kind, components, depth) for kind in about["anyOf"])
    if about.get("type") == "array":
        return f"[{_words(about.get('items', {}), components, depth)}, …]"
    if "properties" in about:
        required = about.get("required", ())
        parts = (
            f'"{name}"{"" if name in required else "?"}: {_words(kind, components, depth)}'
            for name, kind in about["properties"].items()
        )
        return "{" + ", ".join(parts) + "}"
    return str(about.get("type", "…"))
