"""Sandboxes of Linux namespaces, made by bubblewrap without root and in about 10 ms per command.

Inside there are the host's /usr, read-only, an empty /tmp of its own per command, the workspace, and nothing else of
the host; no network, no capabilities, processes of its own. A command's processes live in one process namespace, so
that killing its first process kills them all at once, and they die with the process that started them.

Left out on purpose: limits on memory, processes and disk as a whole (there are only those of single processes), and
user namespaces inside are not forbidden, since bubblewrap before 0.8 cannot. Where the service runs as root the limit
on processes does not bind: the kernel excepts root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from ..output import OUTPUT_LIMIT_BYTES
from ..processes import children, kill
from .base import Sandbox
from .execution import ExecResult, execute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = "bwrap"
DIRECTORY = "/workspace"
LINKED_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Where they are links into /usr they are so inside; where they are folders they are bound."""
BOUND_READ_ONLY = ("/etc/alternatives", "/etc/ld.so.cache")
"""Debian's `awk` and others are links through /etc/alternatives."""
ETC = {
    "passwd": f"root:x:0:0::/:/usr/sbin/nologin\nagent:x:1000:1000::{DIRECTORY}:/bin/bash\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
LIMITER = "/usr/bin/prlimit"
LIMITS = (f"--as={4 * 2**30}", f"--fsize={2**30}", "--nproc=512", "--core=0")
"""Bytes of address space and of one file, processes and threads. Costs 0.8 ms a command (measured)."""
PROBE_LIMIT_S = 10.0
STATUS_BYTES = 64 * 1024


class BubblewrapSandbox(Sandbox):
    """A sandbox whose commands run in namespaces of their own."""

    kind = "bubblewrap"

    @property
    def directory(self) -> str:
        """The path of the workspace as commands see it."""
        return DIRECTORY

    def argv(self, command: Sequence[str]) -> list[str]:
        """Give the host command line that runs `command` inside (see `Sandbox.argv`)."""
        return [*self._namespaces(self.environment()), "--", *_limiter(), *command]

    def kill(self, pid: int) -> None:
        """Kill the process namespace's first process; bubblewrap itself ends when the kernel has killed the rest."""
        kill(*(children(pid) or [pid]))

    def inner_pid(self, pid: int) -> int:
        """Give the host's number of the command: bubblewrap's first grandchild.

        Raises:
            SandboxFailed: it does not run.
        """
        for first in children(pid):
            for command in children(first):
                return command
        raise SandboxFailed("the sandboxed command does not run")

    async def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        stdin: bytes = b"",
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command to its end (see `Sandbox.run`).

        Raises:
            SandboxFailed: bubblewrap did not get as far as to start the command; the message has its words.
        """
        self.unlock()
        inside = {**self.environment(), **(environment or {})}
        ours, theirs = os.pipe()
        try:
            result = await execute(
                [*self._namespaces(inside), "--json-status-fd", str(theirs), "--", *_limiter(), *command],
                environment=self.environment(),  # bubblewrap's own; the command's is set inside
                folder=self.workspace,
                stdin=stdin,
                timeout_s=timeout_s,
                output_limit_bytes=output_limit_bytes,
                kill=self.kill,
                pass_fds=(theirs,),
            )
            # Its exit code is also 1 where the namespaces were refused; only the status tells that the command ran.
            os.set_blocking(ours, False)
            os.close(theirs)
            theirs = -1
            started = result.timed_out or b'"exit-code"' in os.read(ours, STATUS_BYTES)
        finally:
            os.close(ours)
            if theirs >= 0:
                os.close(theirs)
        if not started:
            reason = result.stderr.decode("utf-8", "replace").strip()
            raise SandboxFailed(f"bubblewrap could not start a command: {reason or 'it said nothing'}")
        return result

    def _namespaces(self, environment: Mapping[str, str]) -> list[str]:
        etc = self.path / "etc"
        arguments = [PROGRAM, *_fixed_arguments(), "--bind", str(self.workspace), DIRECTORY, "--chdir", DIRECTORY]
        for name in ETC:
            arguments += ["--ro-bind", str(etc / name), f"/etc/{name}"]
        arguments.append("--clearenv")
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        return arguments

    def _prepare(self) -> None:
        etc = self.path / "etc"
        etc.mkdir(0o755)
        for name, content in ETC.items():
            (etc / name).write_text(content)


def bubblewrap_problem() -> str | None:
    """Try bubblewrap, and give why it cannot be used on this machine and what to do; None if it can. Blocks briefly."""
    if shutil.which(PROGRAM) is None:
        return (
            "bubblewrap is not installed; install the Debian package bubblewrap, or allow no isolation with "
            "--sandbox process"
        )
    try:
        probe = subprocess.run(
            [PROGRAM, *_fixed_arguments(), "--", "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work: {error}; allow no isolation with --sandbox process"
    if probe.returncode == 0:
        return None
    reason = probe.stderr.decode("utf-8", "replace").strip()
    if "namespace" in reason or "uid map" in reason or "Operation not permitted" in reason:
        return (
            f"this machine refuses user namespaces ({reason}); allow them (sysctl kernel.unprivileged_userns_clone=1, "
            "on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0, in a container its seccomp profile), or allow "
            "no isolation with --sandbox process"
        )
    return f"bubblewrap does not work here ({reason}); allow no isolation with --sandbox process"


@cache
def _fixed_arguments() -> tuple[str, ...]:
    """Give what all sandboxes of this host have in common."""
    arguments = ["--unshare-user", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    arguments += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for folder in map(Path, LINKED_FOLDERS):
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    for path in BOUND_READ_ONLY:
        arguments += ["--ro-bind-try", path, path]
    # Where the service runs as root, the command's user is root to the kernel and may write /proc/sys, namespaces or
    # not: a command could set core_pattern and so run a program on the host. A read-only /proc stops that.
    arguments += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108 - its own
    return tuple(arguments)


@cache
def _limiter() -> tuple[str, ...]:
    return (LIMITER, *LIMITS) if os.access(LIMITER, os.X_OK) else ()
