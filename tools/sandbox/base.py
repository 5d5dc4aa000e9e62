"""A sandbox: a folder on the host, and a way to start commands that act in it.

    ROOT/NAME/              the sandbox's own folder, 0700: `handle.path`
    ROOT/NAME/workspace/    what its commands see as their working directory

The folder is the whole state: there is no process per sandbox, so any process of the node can attach to one by its
handle. Whoever is given the sandbox closes it; until then nothing else removes it. Commands belong to whoever started
them. What a command may do to its workspace is anything: the host's side never follows a link that it planted.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import SandboxFailed
from ...messages import SandboxHandle
from ..output import OUTPUT_LIMIT_BYTES
from ..processes import to_the_end
from . import files, tree
from .execution import ExecResult, execute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Self

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""What a sandbox may be called. No name starts with a dot: those are for what is being removed."""
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
READ_LIMIT_BYTES = 16 * 2**20
COPY_LIMIT_BYTES = 4 * 2**30
"""Largest workspace that is copied."""
COPY_LIMIT_S = 60.0
CLOSE_LIMIT_S = 30.0
CHECK_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "HOME": "/nonexistent",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": "false",
        "GIT_CONFIG_KEY_1": "core.hooksPath",
        "GIT_CONFIG_VALUE_1": "/dev/null",
    }
)
"""For `Sandbox.run` of a program that judges a workspace which somebody else wrote.

A home in the workspace would let its writer choose what the judge's own programs load: `usercustomize.py` below
`~/.local`, `.gitconfig`, `.bashrc`. So there is none; Python imports nothing from the working directory or a script's
folder, nor cached bytecode (a planted one need not match its source); and git runs no program that a repository's
configuration names as a hook or monitor. A judge that wants to import from the workspace says so: `PYTHONPATH=.`.
Programs that read their configuration from the working directory itself (`conftest.py`, `Makefile`, git's filters) are
not covered: such a judge still believes what it judges.
"""


class Sandbox(ABC):
    """Where the tools of one job act. Made by `Sandboxes.create`, found again by `Sandboxes.attach`.

    Args:
        path: the sandbox's own folder.
        node: the name of the node that the folder is on.
    """

    kind: ClassVar[Literal["bubblewrap", "process"]]

    def __init__(self, path: Path, node: str) -> None:
        self.handle = SandboxHandle(self.kind, str(path), node)
        """Enough for another process of the node to attach to this sandbox."""
        self.path = path
        self.workspace = path / "workspace"
        """The host's folder that commands see as their working directory."""

    @property
    @abstractmethod
    def directory(self) -> str:
        """The path of the workspace as commands see it."""

    @abstractmethod
    def argv(self, command: Sequence[str]) -> list[str]:
        """Give the host command line that runs `command` inside.

        Start it with `environment()` and in the folder `workspace`, from a thread that lives as long as the command
        should: bubblewrap dies with the thread that started it.
        """

    @abstractmethod
    def kill(self, pid: int) -> None:
        """Kill what runs below the not yet reaped host process `pid`, which was started from `argv`; it ends as well.

        When it has ended, so have the others, as far as the kind can promise it.
        """

    @abstractmethod
    def inner_pid(self, pid: int) -> int:
        """Give the host's number of the command itself, where `pid` was started from `argv` and the command runs."""

    def environment(self) -> dict[str, str]:
        """Give the whole environment of commands: none of the host's variables."""
        return {
            "PATH": SEARCH_PATH,
            "HOME": self.directory,
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PAGER": "cat",
            "GIT_PAGER": "cat",
            "MANPAGER": "cat",
        }

    def unlock(self) -> None:
        """Give the owner access to the workspace again: a command may have taken it, with `chmod 000 .`.

        Call it before something is started from `argv`; `run`, `copy` and the file calls do so themselves.

        Raises:
            SandboxFailed: the workspace is gone, or is another user's.
        """
        try:
            tree.grant(str(self.workspace), None, 0o700)
        except OSError as error:
            raise SandboxFailed(f"the workspace of {self.path.name} cannot be entered: {error.strerror}") from error

    async def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        stdin: bytes = b"",
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command to its end, with pipes for its input and outputs.

        All that it started is killed at the end, at the time limit, and when the call is cancelled.

        Args:
            command: the program, by path or as found on `SEARCH_PATH`, and its arguments.
            timeout_s: after that it is killed.
            stdin: its whole input.
            output_limit_bytes: how much is kept of each of its two outputs.
            environment: variables that are added to `environment()`, or take the place of its own.

        Raises:
            SandboxFailed: the sandbox could not be started: the result says nothing about the command.
        """
        self.unlock()
        return await execute(
            self.argv(command),
            environment={**self.environment(), **(environment or {})},
            folder=self.workspace,
            stdin=stdin,
            timeout_s=timeout_s,
            output_limit_bytes=output_limit_bytes,
            kill=self.kill,
        )

    def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a regular file of the workspace, with the folders that lead to it.

        Raises:
            SandboxFailed: `path` is not relative, leaves the workspace, leads through a symbolic link, or is no
                regular file; or the disk refuses it.
        """
        self.unlock()
        files.write_file(self.workspace, path, data, mode)

    def read_file(self, path: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        """Read a regular file of the workspace.

        Raises:
            SandboxFailed: as for `write_file`; or it is missing (`reason` is `missing`) or larger than `limit_bytes`.
        """
        self.unlock()
        return files.read_file(self.workspace, path, limit_bytes)

    async def copy(self, name: str) -> Self:
        """Make a new sandbox of that name beside this one, with a copy of the workspace (see `tree.copy_tree`).

        Raises:
            SandboxFailed: the name is not one or is taken; or the workspace cannot be copied, where `reason` is `tree`
                if that is the fault of what commands left in it (too large, too deep), and `time` or `system` if not.
        """
        self.unlock()
        new = type(self)(named(self.path.parent, name), self.handle.node)
        new.make()
        try:
            await to_the_end(
                asyncio.to_thread(tree.copy_tree, self.workspace, new.workspace, COPY_LIMIT_BYTES, COPY_LIMIT_S)
            )
        except BaseException:
            await to_the_end(new.close())
            raise
        return new

    async def close(self) -> None:
        """Remove the sandbox with its content, whatever its commands left there; may be called again.

        Raises:
            SandboxFailed: it is not done within `CLOSE_LIMIT_S`; the sandbox is gone, some of its files are not.
        """
        await to_the_end(asyncio.to_thread(tree.remove_tree, self.path, CLOSE_LIMIT_S))

    def make(self) -> None:
        """Make the sandbox's folders; `Sandboxes` calls it once.

        Raises:
            SandboxFailed: the name is taken, or the disk refuses the folders.
        """
        try:
            self.path.mkdir(0o700)
        except FileExistsError:
            raise SandboxFailed(f"a sandbox called {self.path.name} exists already; close it first") from None
        except OSError as error:
            raise SandboxFailed(f"the sandbox {self.path} cannot be made: {error.strerror}") from error
        try:
            self.workspace.mkdir(0o700)
            self._prepare()
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise SandboxFailed(f"the sandbox {self.path} cannot be made: {error.strerror}") from error

    def _prepare(self) -> None:  # noqa: B027 - a kind may need nothing
        """Write what the kind needs beside the workspace."""


def named(root: Path, name: str) -> Path:
    """Give the folder of the sandbox of that name below `root`.

    Raises:
        SandboxFailed: the name is not one.
    """
    if not NAME.fullmatch(name):
        raise SandboxFailed(f"{name!r} is no name for a sandbox; use up to 128 of A-Z a-z 0-9 . _ -")
    return root / name
