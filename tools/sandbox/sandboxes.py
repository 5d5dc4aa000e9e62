"""The sandboxes of one node: made, and found again, below one private folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import SandboxFailed, SandboxUnavailable
from .base import NAME, named
from .bubblewrap import BubblewrapSandbox, bubblewrap_problem
from .process import ProcessSandbox

if TYPE_CHECKING:
    from ...messages import SandboxHandle
    from .base import Sandbox

KINDS: dict[str, type[Sandbox]] = {cls.kind: cls for cls in (BubblewrapSandbox, ProcessSandbox)}


class Sandboxes:
    """Makes sandboxes of one kind below one folder. Holds nothing open, so it needs no closing.

    Args:
        kind: `bubblewrap`, or `process` for no isolation at all.
        root: the folder that holds the sandboxes; made private (0700) if it is not there.
        node: the node's name, as in sandbox handles.
    """

    def __init__(self, kind: Literal["bubblewrap", "process"], root: Path, node: str = "local") -> None:
        self.kind = kind
        self.root = root.absolute()
        self.node = node

    def check(self) -> None:
        """Try whether this machine can make the kind. Blocks for about 10 ms: for a process's start.

        Raises:
            SandboxUnavailable: it cannot; the message says what to do (`kind`).
        """
        problem = bubblewrap_problem() if self.kind == "bubblewrap" else None
        if problem is not None:
            raise SandboxUnavailable(problem, kind=self.kind)

    async def create(self, name: str) -> Sandbox:
        """Make an empty sandbox; the caller closes it.

        Args:
            name: unique on this node, such as the job's id and attempt; letters, digits, `.`, `_` and `-`.

        Raises:
            SandboxFailed: the name is not one or is taken, or the disk refuses the folder.
        """
        path = named(self.root, name)
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SandboxFailed(f"the sandboxes' folder {self.root} cannot be made: {error.strerror}") from error
        sandbox = KINDS[self.kind](path, self.node)
        sandbox.make()
        return sandbox

    def attach(self, handle: SandboxHandle) -> Sandbox:
        """Find a sandbox that any process of this node made; the caller closes it, unless another one does.

        Raises:
            SandboxFailed: it is of another node or kind, not below this root, or gone.
        """
        path = Path(handle.path)
        if handle.node != self.node:
            raise SandboxFailed(f"the sandbox {path.name} is on node {handle.node}, this is {self.node}")
        if handle.kind != self.kind:
            raise SandboxFailed(f"the sandbox {path.name} is of kind {handle.kind}; this process allows {self.kind}")
        if path.parent != self.root or not NAME.fullmatch(path.name):
            raise SandboxFailed(f"{path} is not a sandbox's folder below {self.root}")
        sandbox = KINDS[self.kind](path, self.node)
        if path.is_symlink() or not sandbox.workspace.is_dir():
            raise SandboxFailed(f"the sandbox {path.name} is gone")
        return sandbox
