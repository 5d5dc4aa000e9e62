"""A harness that runs in a sandbox: its home, its settings, and its one process until that ends.

The sandbox shows what the installation `binds`, and lets a process reserve `ADDRESS_SPACE_BYTES`. `Sandbox.exec` kills
the harness's process session at its end; what left the session ends with `Sandbox.end_processes`, or the sandbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...tools.execution.messages import ExecResult
    from ...tools.sandbox.sandbox import Sandbox
    from .adapter import Adapter, LaunchRequest

ADDRESS_SPACE_BYTES = 2**40
"""What a sandbox must allow one process (see `Limits`): JavaScript engines reserve that much, and use little of it."""
MARK = ".prorl"
"""A file that makes a home without settings."""


def home_in(sandbox: Sandbox) -> str:
    """Return where a harness keeps its settings: outside of the workspace, where the sandbox has such a place."""
    return "/tmp/harness" if sandbox.isolated else f"{sandbox.directory}/.harness"  # noqa: S108 - the sandbox's own


async def run_harness(sandbox: Sandbox, adapter: Adapter, request: LaunchRequest, timeout_s: float) -> ExecResult:
    """Run a harness to its end, or to the time limit.

    Raises:
        SandboxFailed: the sandbox is gone.
        ConfigError: the harness cannot do what is asked.
    """
    launch = adapter.launch(request)
    files = {f"{request.home}/{path}": text.encode() for path, text in launch.files.items()}
    await sandbox.write_files({f"{request.home}/{MARK}": b"", **files}, mode=0o600)
    environment = dict(launch.environment)
    return await sandbox.exec(
        launch.argv, timeout_s, stdin=launch.stdin, environment=environment, directory=request.directory
    )
