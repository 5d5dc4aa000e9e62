"""`Adapter`: how a harness is installed and started, and what its calls are for.

An adapter is pure: it returns a command line, an environment and files. The prompt goes to standard input or into a
file, never into an argument, which could be taken for an option or exceed the kernel's 128 KiB. Nor does the key, since
others can read the process table. A package adds a harness with one class, and one line of its entry points:

    prorl_zmq.harnesses =
        my-harness = my_package.my_harness:MyHarness
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ...errors import ConfigError
from ...system.plugins import load_plugin, offered

if TYPE_CHECKING:
    from collections.abc import Mapping

ENTRY_POINT_GROUP = "prorl_zmq.harnesses"
NODE = "24.21.0"


class CallKind(StrEnum):
    """The purpose of a model call."""

    MAIN = "main"
    SUBAGENT = "subagent"
    SIDE = "side"
    """Titles, memories, commit messages."""
    COMPACTION = "compaction"
    """A summary that replaced a history."""


@dataclass(frozen=True, slots=True)
class Npm:
    """A package of the npm registry. Its scripts are not run."""

    package: str
    version: str
    """The tested version; users may install another."""
    program: str
    """Its program below `node_modules`, `{arch}` being x64 or arm64; `bin/COMMAND` of the installation links to it."""
    command: str
    executables: tuple[str, ...] = ()
    """Further programs below `node_modules` whose archive lacks the executable bit."""
    node: str = ""
    """The version of Node that runs it, installed as `bin/node`; empty: it needs none."""


@dataclass(frozen=True, slots=True)
class PyPI:
    """A package of PyPI, installed in a virtual environment. Its scripts are run by `bin/python`."""

    package: str
    version: str
    """The tested version; users may install another."""
    also: tuple[str, ...] = ()
    """Further requirements; `{version}` stands for the package's. Without a package, all of them."""
    python: tuple[int, int] = (3, 11)
    """The oldest supported Python."""
    newest: tuple[int, ...] = ()
    """The newest supported Python, such as (3, 12), which includes its patches, or (3, 12, 0); empty: any."""


class McpCommand(NamedTuple):
    """An MCP server that a harness starts."""

    command: str
    args: list[str]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The settings of one rollout for a harness."""

    url: str
    """The model's address, such as http://127.0.0.1:8000; without a path."""
    key: str
    """The API key that the harness sends; it protects nothing."""
    model: str
    prompt: str
    home: str
    """A writable folder inside the sandbox, empty except for `Launch.files`."""
    directory: str
    """The agent's working directory."""
    folder: str
    """The installation inside the sandbox; read-only."""
    context_tokens: int
    """Most tokens of a prompt and its answer; the harness compacts its history earlier, if it can."""
    max_tokens: int
    """Most tokens of an answer."""
    arguments: tuple[str, ...] = ()
    """Appended to the command line; for harness `command`, all of it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment, overriding the adapter's variables."""
    mcp: Mapping[str, McpCommand] = field(default_factory=dict)
    """MCP servers that it starts, by name; empty unless the adapter `takes_mcp`."""

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of a prompt that leaves room for an answer."""
        return max(1, self.context_tokens - self.max_tokens)

    @property
    def mcp_servers(self) -> dict[str, dict[str, Any]]:
        """The MCP servers as most programs' configuration has them, below `mcpServers`."""
        return {name: server._asdict() for name, server in self.mcp.items()}

    def program(self, command: str) -> str:
        return f"{self.folder}/bin/{command}"

    def python(self, script: str, *options: str) -> tuple[str, ...]:
        """Return the command line of a Python script with options and the caller's arguments."""
        return (self.program("python"), "-c", script, *options, *self.arguments)

    @property
    def plain_prompt(self) -> str:
        """The prompt, for harnesses that would read a leading `/help` or `!ls` as a user's command."""
        return f"Task: {self.prompt}" if self.prompt.lstrip().startswith(("/", "!")) else self.prompt


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a harness."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    stdin: bytes = b""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files written before the start: the path below the home, and the text."""


class ShellTool(NamedTuple):
    """The tool with which a model runs a shell command."""

    name: str
    argument: str = "command"
    """The argument that holds the command."""
    more: Mapping[str, Any] = {}
    """The other arguments."""


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """A turn of a scripted model, in this harness's terms."""

    text: str = ""
    tool: str = ""
    """The tool of its one call; empty: no call."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Adapter(ABC):
    """One harness, without state; made without arguments."""

    name: ClassVar[str]
    """The name that users write, and under which it is registered."""
    package: ClassVar[Npm | PyPI | None]
    """None: nothing is installed."""
    refusal_status: ClassVar[int] = 400
    """The HTTP status, 400 or 403, after which it gives up soonest."""
    takes_mcp: ClassVar[bool] = False
    """It starts the MCP servers of `LaunchRequest.mcp`."""
    shell: ClassVar[ShellTool | None] = None
    """None: it runs no commands of a model."""

    def launch(self, request: LaunchRequest) -> Launch:
        """Return how to start it.

        Raises:
            ConfigError: the harness does not support the request.
        """
        made = self._launch(request)
        return replace(made, environment={"HOME": request.home, **made.environment, **request.environment})

    @abstractmethod
    def _launch(self, request: LaunchRequest) -> Launch:
        """Return how to start it, without the home and the caller's own environment."""

    def kind_of(self, headers: Mapping[str, str]) -> CallKind | None:
        """Return the kind of a call from its headers (lower-case names); None: they do not tell."""
        del headers
        return None

    def shell_turn(self, command: str) -> ScriptedTurn:
        """Return the model's turn that has the harness run a shell command.

        Raises:
            ConfigError: it runs none.
        """
        if self.shell is None:
            raise ConfigError(f"the harness {self.name} runs no commands of a model", key="harness")
        tool = self.shell
        return ScriptedTurn(tool=tool.name, arguments={tool.argument: command, **tool.more})

    def write_turn(self, path: str, content: str) -> ScriptedTurn:
        """Return the model's turn that has the harness write a file in its working directory.

        Raises:
            ConfigError: it writes none.
        """
        return self.shell_turn(f"printf %s {shlex.quote(content)} > {shlex.quote(path)}")

    def final_turn(self) -> ScriptedTurn:
        """Return the model's turn that ends its work."""
        return ScriptedTurn("Done.")


def known_harnesses() -> list[str]:
    return list(offered(ENTRY_POINT_GROUP))


def load_adapter(name: str) -> Adapter:
    """Return the adapter of a harness.

    Raises:
        ConfigError: no installed package offers it, or its entry point names no such `Adapter`.
    """
    base = f"{Adapter.__module__}:{Adapter.__qualname__}"
    loaded: type[Adapter] = load_plugin(ENTRY_POINT_GROUP, name, "harness", key="harness", base=base)
    if loaded.name != name:
        where = f"{loaded.__module__}:{loaded.__qualname__}"
        raise ConfigError(f"the harness {name} ({where}) has name = {loaded.name!r}; write {name!r}", key="harness")
    return loaded()
