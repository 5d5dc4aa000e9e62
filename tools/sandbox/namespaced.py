"""Containers of Linux namespaces: a runtime (Apptainer, bubblewrap) makes them, and a shell keeps them open.

    execution server ── runtime ── first process of the namespaces ── /bin/sh, which waits for a line that never comes
                    └── commands, which have joined

The shell's input is a pipe from this process, and the kernel signals the runtime when this process dies: either way the
namespaces' first process ends, and with it, by the kernel, all others. Limits are those of each process; for all of
them together see `execution.watch`. A command may trace the shell and the first process, which are its user's, and so
become them: they have the limits and the system call filter too, and are watched.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import subprocess
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...errors import SandboxFailed
from ...system.processes import die_with_parent
from ..images.image import lock_image
from ..processes import PROC, Child, become_subreaper, children, descendants, kill
from . import forking, namespaces, seccomp
from .container import KILL_LIMIT_S, SEARCH_PATH, Container
from .pids_cgroup import make_pids_cgroup
from .root_image import check_image

if TYPE_CHECKING:
    from ..images.image import ImageLock
    from .pids_cgroup import PidsCgroup
    from .specification import SandboxSpec

SHELL = ("/bin/sh", "-c", "echo ready; read -r line")
START_LIMIT_S = 60.0
WORDS_BYTES = 4096
"""How much of the runtime's words an error has."""
RUNTIME_VARIABLES = frozenset(
    {"PATH", "HOME", "TMPDIR", "APPTAINER_TMPDIR", "APPTAINER_CACHEDIR", "APPTAINER_CONFIGDIR", "XDG_RUNTIME_DIR"}
)
"""All that a runtime sees of this process's environment. A part of it lives inside, where commands can read that."""
DROPPED_PREFIXES = ("APPTAINER", "SINGULARITY", "PROMPT_COMMAND", "PS1", "PWD", "OLDPWD", "SHLVL", "LD_")
"""Variables of the shell that are the runtime's, not the image's."""


class NamespacedContainer(Container):
    """A container whose commands join namespaces that a runtime made."""

    death_signal: ClassVar[int] = signal.SIGKILL
    """What the kernel sends the runtime when this process dies."""

    def __init__(self, path: Path, spec: SandboxSpec) -> None:
        super().__init__(path, spec)
        self._runtime: Child | None = None
        self._holding: dict[int, int] = {}
        """The processes that keep the container open, the namespaces' first one and the shell, with their pidfds: the
        end of either is the container's."""
        self._namespaces: namespaces.Namespaces | None = None
        self._changing = asyncio.Lock()
        """Held while the container is started or ended."""
        self._shell_input = -1
        """The pipe to the shell; nothing is written to it."""
        self._cgroup: PidsCgroup | None = None
        self._image: ImageLock | None = None
        """Keeps the image's files; the runtime outlives a killed server only for a moment."""
        self._environment: dict[str, str] = {}
        """The image's own."""

    @abstractmethod
    def _runtime_argv(self, image: Path | None, passed: list[int]) -> list[str]:
        """Return the host command line that runs a program inside, the program left out.

        Raises:
            SandboxFailed: the image or the spec does not suit the kind.
        """

    def environment(self) -> dict[str, str]:
        """Return the environment of commands: the image's, the standard one but for PATH, the task's over both."""
        path = self._environment.get("PATH", SEARCH_PATH)
        return {**self._environment, **super().environment(), "PATH": path, **self.spec.environment}

    async def start(self) -> None:
        async with self._changing:
            await self._start()

    async def _start(self) -> None:
        become_subreaper()
        self.starts += 1
        if self.spec.image and self._image is None:
            self._image = lock_image(Path(self.spec.image))
        if self._image is not None:
            check_image(self.kind, self.image_formats, self._image.path)
        passed: list[int] = []
        argv = [*self._runtime_argv(self._image.path if self._image is not None else None, passed), *SHELL]
        log = self.path / "runtime.log"
        ready, ready_end = os.pipe()
        shell_input, self._shell_input = os.pipe()
        parent, number = os.getpid(), self.death_signal
        try:
            with log.open("wb") as words:
                process = subprocess.Popen(  # noqa: ASYNC220 - only the start blocks, about a millisecond
                    argv,
                    stdin=shell_input,
                    stdout=ready_end,
                    stderr=words,
                    env={name: value for name, value in os.environ.items() if name in RUNTIME_VARIABLES},
                    start_new_session=True,
                    pass_fds=passed,
                    preexec_fn=lambda: die_with_parent(parent, number),  # noqa: PLW1509 - there are no threads
                )
        except OSError as error:
            os.close(ready)
            self._forget_runtime()
            raise SandboxFailed(f"{argv[0]} cannot be started: {error.strerror}") from error
        finally:
            for descriptor in (ready_end, shell_input, *passed):
                os.close(descriptor)
        process.returncode = 0  # it is waited for by its number; Popen must not
        self._runtime = Child(process.pid)
        try:
            await self._open(ready)
        except BaseException:
            await self._close()
            raise
        finally:
            os.close(ready)

    async def ensure_running(self) -> None:
        async with self._changing:
            if self._runtime is None or any(map(_ended, self._holding.values())):
                await self._close()
                await self._start()

    async def restart(self, number: int) -> None:
        async with self._changing:
            if self.starts == number:
                await self._close()
                await self._start()

    async def close(self) -> None:
        async with self._changing:
            await self._close()

    async def _close(self) -> None:
        runtime = self._runtime
        if runtime is None:
            self._unlock_image()
            return
        kill(*(children(runtime.pid) or [runtime.pid]))
        # The namespaces' first process cannot end before the others are reaped, and those that joined are ours.
        await self._reap_spawned()
        if not await runtime.wait(KILL_LIMIT_S):
            self.kill_all()
            kill(runtime.pid)
            if not await runtime.wait(KILL_LIMIT_S):
                raise SandboxFailed(f"a container did not end within {2 * KILL_LIMIT_S:g} s of being killed")
        runtime.reap()
        runtime.close()
        self._runtime = None
        self._forget_runtime()
        self._unlock_image()

    def processes(self, at_most: float = math.inf) -> list[int]:
        """Return all processes of commands: those that joined, what is below them, and what was orphaned inside."""
        found: dict[int, None] = {}
        for pid in self._spawned:
            if (PROC / str(pid)).exists():
                found.update(dict.fromkeys((pid, *descendants(pid, at_most))))
        if self._runtime is not None:
            for first in children(self._runtime.pid):
                found.update(dict.fromkeys(descendants(first, at_most)))
        return [pid for pid in found if pid not in self._holding or _ended(self._holding[pid])]

    def holding(self) -> list[int]:
        # A command may trace them, and make them do its work.
        return [pid for pid, pidfd in self._holding.items() if not _ended(pidfd)]

    def kill_all(self) -> None:
        """Kill the namespaces' first process: the kernel kills all others, also those that are being started."""
        if self._runtime is not None and not self._runtime.ended:
            kill(*children(self._runtime.pid))

    def _join(self, report: int, *, limited: bool) -> None:
        namespaces.hide()
        forking.be_killed_first()
        if self._cgroup is not None:
            self._cgroup.enter()
        if self._namespaces is None:
            raise ProcessLookupError("the container has ended")
        self._namespaces.enter()
        child = os.fork()
        if child:
            forking.tell_inner(report, child)
            os._exit(0)
        self._limit(0, address_space=limited)
        if not self.spec.fakeroot:
            namespaces.drop_capabilities()
        namespaces.forbid_new_privileges()
        seccomp.install()

    def _kept_descriptors(self) -> tuple[int, ...]:
        cgroup = () if self._cgroup is None else (self._cgroup.descriptor,)
        return cgroup if self._namespaces is None else (*self._namespaces.descriptors, *cgroup)

    def _runtime_pids(self) -> frozenset[int]:
        return frozenset() if self._runtime is None else frozenset({self._runtime.pid})

    async def _open(self, ready: int) -> None:
        """Wait for the shell, and open its namespaces."""
        assert self._runtime is not None
        if not await _is_ready(ready, self._runtime, START_LIMIT_S):
            with (self.path / "runtime.log").open("rb") as log:
                words = log.read(WORDS_BYTES).decode("utf-8", "replace").strip()
            problem = words or f"it said nothing within {START_LIMIT_S:g} s"
            raise SandboxFailed(f"{self.kind} could not start a container: {problem}", reason="start")
        chain = [self._runtime.pid]
        while below := children(chain[-1]):
            chain.append(below[0])
        shell = chain[-1]
        try:
            self._holding = {pid: os.pidfd_open(pid) for pid in chain if _in_one_process_namespace(pid, shell)}
            self._namespaces = namespaces.Namespaces(shell)
            if not _is_inside(shell, self._namespaces):
                raise SandboxFailed(f"a container of {self.kind} was not ready when it said so", reason="start")
            self._cgroup = make_pids_cgroup(self.starts, self.spec.limits.processes)
            for pid in self._holding:
                if self._cgroup is not None:
                    self._cgroup.add(pid)
                # Neither starts anything by itself; but the first one may be a program of many threads that needs an
                # address space of gigabytes and must not fail at a new thread, and those are watched in any case.
                self._limit(pid, address_space=pid == shell, processes=pid == shell)
            if os.geteuid() == 0:
                self._protect_devices(self._namespaces)
            variables = (PROC / str(shell) / "environ").read_bytes().decode("utf-8", "surrogateescape")
        except OSError as error:
            raise SandboxFailed(f"a container of {self.kind} ended as it started: {error.strerror}") from error
        pairs = (variable.partition("=") for variable in variables.split("\0") if variable)
        self._environment = {name: value for name, _, value in pairs if not name.startswith(DROPPED_PREFIXES)}

    def _unlock_image(self) -> None:
        if self._image is not None:
            self._image.close()
            self._image = None

    def _forget_runtime(self) -> None:
        for descriptor in (*self._holding.values(), self._shell_input):
            with suppress(OSError):
                os.close(descriptor)
        self._holding = {}
        self._shell_input = -1
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None
        if self._cgroup is not None:
            self._cgroup.close()
            self._cgroup = None

    def _protect_devices(self, inside: namespaces.Namespaces) -> None:
        ours, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            forking.child(inside.protect_devices, report, inside.descriptors)
        os.close(report)
        _, _, problem = forking.read_report(ours)
        os.waitpid(pid, 0)
        if problem:
            raise SandboxFailed(f"the host's devices cannot be protected in a container: {problem}", reason="start")


def _is_inside(pid: int, inside: namespaces.Namespaces) -> bool:
    """Return whether a process is the shell, in a container of its own, after the change of its root."""
    wanted = namespaces.KINDS["mnt"] | namespaces.KINDS["pid"]
    command = (PROC / str(pid) / "cmdline").read_bytes()
    theirs = os.stat(f"/proc/{pid}/root")  # noqa: PTH116
    return (
        inside.kinds & wanted == wanted
        and command == b"\0".join(map(os.fsencode, SHELL)) + b"\0"
        and not os.path.samestat(theirs, os.stat("/"))  # noqa: PTH116
    )


def _in_one_process_namespace(one: int, other: int) -> bool:
    return os.path.samestat(os.stat(f"/proc/{one}/ns/pid"), os.stat(f"/proc/{other}/ns/pid"))  # noqa: PTH116


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


async def _is_ready(ready: int, runtime: Child, timeout_s: float) -> bool:
    """Wait for the shell's first line; return whether it came before the runtime's end or the limit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()

    def read() -> None:
        loop.remove_reader(ready)
        if not answer.done():
            answer.set_result(os.read(ready, 64).startswith(b"ready"))

    loop.add_reader(ready, read)
    runtime.when_ended(lambda: None if answer.done() else answer.set_result(False))
    try:
        await asyncio.wait((answer,), timeout=timeout_s)
    finally:
        loop.remove_reader(ready)
    return answer.done() and answer.result()
