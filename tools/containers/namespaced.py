"""Containers of Linux namespaces: a runtime (Apptainer, bubblewrap) makes them, and a holder keeps them open.

    execution server ── runtime ── holder, process 1 of the namespaces
                    └── commands, which have joined

The holder's input is a pipe from this process, the kernel signals the runtime when this process dies, and this process
sees the runtime's end: in each case the holder ends, and with it, by the kernel, all others. Limits are those of each
process; for all of them together see `execution.watch`. Commands can neither signal the holder nor trace it.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import random
import signal
import socket
import subprocess
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...errors import SandboxFailed
from ...system.processes import become_subreaper, die_with_parent
from ..images.image import lock_image
from ..processes.child import Child
from ..processes.process_tree import PROC, children, descendants, kill
from . import forking, holder, namespaces, seccomp, users
from .cgroups import QUOTA, make_cgroups
from .container import KILL_LIMIT_S, SEARCH_PATH, Container, listen
from .root_image import check_image

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ..images.image import ImageLock
    from .cgroups import Cgroups
    from .specification import SandboxSpec

START_LIMIT_S = 60.0
NICENESS = 10
"""Of commands: the service itself, and other programs of the node, come first."""
REAP_EVERY_S = 0.02
WORDS_BYTES = 4096
"""How much of the runtime's output an error has."""
RUNTIME_VARIABLES = frozenset(
    {"PATH", "HOME", "TMPDIR", "APPTAINER_TMPDIR", "APPTAINER_CACHEDIR", "APPTAINER_CONFIGDIR", "XDG_RUNTIME_DIR"}
)
"""All that a runtime sees of this process's environment: commands can read a part of it."""
DROPPED_PREFIXES = ("APPTAINER", "SINGULARITY", "PROMPT_COMMAND", "PS1", "PWD", "OLDPWD", "SHLVL", "LD_")
"""Variables of the holder that are the runtime's, not the image's."""


class NamespacedContainer(Container):
    """A container whose commands join namespaces that a runtime made."""

    death_signal: ClassVar[int] = signal.SIGKILL
    """What the kernel sends the runtime when this process dies; 0: the runtime handles that itself."""

    def __init__(self, path: Path, spec: SandboxSpec) -> None:
        super().__init__(path, spec)
        self._runtime: Child | None = None
        self._holder: Child | None = None
        """Process 1 of the namespaces, a child of the runtime's."""
        self._namespaces: namespaces.Namespaces | None = None
        self._changing = asyncio.Lock()
        """Held while the container is started or ended."""
        self._holder_input = -1
        self._cgroups: Cgroups | None = None
        self._cpus: Collection[int] = ()
        """The processors on which commands start, where no cgroup limits their time; empty: all."""
        self._image: ImageLock | None = None
        """Keeps the image's files; the runtime outlives a killed server only for a moment."""
        self._environment: dict[str, str] = {}
        """The image's own."""

    @abstractmethod
    def _runtime_argv(self, image: Path | None, passed: list[int]) -> list[str]:
        """Return the host command line that runs a program inside, without the program.

        Raises:
            SandboxFailed: the image or the spec does not suit the kind.
        """

    def _explained(self, words: str) -> str:
        """Return the runtime's words at a failed start, with what to do about it."""
        return words

    def environment(self) -> dict[str, str]:
        """Return the environment of commands: the image's, the standard one except PATH, the task's over both."""
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
        argv = self._runtime_argv(self._image.path if self._image is not None else None, passed)
        try:
            program = holder.opened()
        except KeyError as error:
            raise SandboxFailed(f"{self.kind} sandboxes are not made on {error.args[0]} machines") from None
        passed.append(program)
        log = self.path / "runtime.log"
        ready, ready_end = os.pipe()
        holder_input, self._holder_input = os.pipe()
        parent, number = os.getpid(), self.death_signal
        try:
            with log.open("wb") as words:
                process = subprocess.Popen(  # noqa: ASYNC220 - only the start blocks, about a millisecond
                    [*argv, f"/proc/self/fd/{program}"],
                    stdin=holder_input,
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
            for descriptor in (ready_end, holder_input, *passed):
                os.close(descriptor)
        process.returncode = 0  # it is waited for by its number; Popen must not
        runtime = self._runtime = Child(process.pid)
        # Called a turn of the loop later, when the next container may have begun.
        runtime.when_ended(lambda: self.kill_all() if self._runtime is runtime else None)
        try:
            await self._open(ready)
        except BaseException:
            await self._close()
            raise
        finally:
            os.close(ready)

    async def ensure_running(self) -> None:
        async with self._changing:
            if self._runtime is None or self._runtime.ended or self._holder is None or self._holder.ended:
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
        self.kill_all()
        # The namespaces' first process cannot end before the others are reaped, and those that joined are ours.
        await self._reap_spawned()
        if not await self._have_ended():
            self.kill_all()
            kill(runtime.pid)
            if not await self._have_ended():
                raise SandboxFailed(f"a container did not end within {2 * KILL_LIMIT_S:g} s of being killed")
        runtime.reap()
        runtime.close()
        self._runtime = None
        kill(*self.processes())  # a runtime that was killed as it began may leave a child that waits for it
        self.reap_orphans()
        self._forget_runtime()
        self._unlock_image()

    async def _have_ended(self) -> bool:
        """Wait for the runtime and the holder, which ends only when all others inside are reaped."""
        for _ in range(int(KILL_LIMIT_S / REAP_EVERY_S)):
            left = [each for each in (self._runtime, self._holder) if each is not None and not each.ended]
            if not left:
                return True
            self.reap_orphans()
            await left[0].wait(REAP_EVERY_S)
        return False

    def processes(self, at_most: float = math.inf) -> list[int]:
        # A command may make itself a sibling, so all children of ours that are inside count, not those that we started.
        found: dict[int, None] = {}
        for pid in children(os.getpid(), at_most):
            if pid not in self._runtime_pids() and _is_in_a_namespace(pid):
                found.update(dict.fromkeys((pid, *descendants(pid, at_most))))
        for pid in self.holding():
            found.update(dict.fromkeys(descendants(pid, at_most)))
        return list(found)

    def holding(self) -> list[int]:
        # Root of a fakeroot container may take it over.
        return [] if self._holder is None or self._holder.ended else [self._holder.pid]

    def kill_all(self) -> None:
        """Kill process 1 of the namespaces: the kernel kills all others, also those that are being started."""
        if self._holder is not None:
            self._holder.kill()
        elif self._runtime is not None and not self._runtime.ended:
            kill(*(children(self._runtime.pid) or [self._runtime.pid]))

    def listening_socket(self, port: int) -> socket.socket:
        if self.spec.network:
            return super().listening_socket(port)
        if self._namespaces is None:
            raise SandboxFailed("the container has ended")
        entered = self._namespaces
        ours, theirs = socket.socketpair(socket.AF_UNIX)

        def make() -> None:
            entered.enter_network()
            with socket.socket() as made:
                socket.send_fds(theirs, [b"S"], [made.fileno()])

        with ours, theirs:
            if problem := _in_a_child(make, (*entered.descriptors, theirs.fileno())):
                raise SandboxFailed(f"a sandbox's network cannot be joined: {problem}")
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        return listen(socket.socket(fileno=descriptors[0]), port)

    def _join(self, report: int, *, limited: bool, user: str = "") -> None:
        # A service of root has no user namespace for its containers: what is root inside is so to the kernel.
        kept = namespaces.ROOTS_OWN if self.spec.fakeroot and os.geteuid() != 0 else ()
        namespaces.hide()
        forking.be_killed_first()
        os.nice(NICENESS)
        if self._cgroups is not None:
            self._cgroups.enter()
        if self._namespaces is None:
            raise ProcessLookupError("the container has ended")
        self._namespaces.enter()
        child = os.fork()
        if child:
            forking.tell_inner(report, child)
            os._exit(0)
        self._limit(0, address_space=limited)
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        if user:
            users.become(users.find(user))
        if not user or os.geteuid() == 0:
            namespaces.drop_capabilities(kept)
        namespaces.forbid_new_privileges()
        seccomp.install()

    def _kept_descriptors(self) -> tuple[int, ...]:
        cgroups = () if self._cgroups is None else self._cgroups.descriptors
        return (*(() if self._namespaces is None else self._namespaces.descriptors), *cgroups)

    def _runtime_pids(self) -> frozenset[int]:
        return frozenset() if self._runtime is None else frozenset({self._runtime.pid})

    async def _open(self, ready: int) -> None:
        """Wait for the holder, open its namespaces, and let it close itself."""
        assert self._runtime is not None
        if not await _is_ready(ready, self._runtime, START_LIMIT_S):
            with (self.path / "runtime.log").open("rb") as log:
                words = log.read(WORDS_BYTES).decode("utf-8", "replace").strip()
            how = "and ended" if self._runtime.ended else f"within {START_LIMIT_S:g} s"
            problem = self._explained(words) or f"it said nothing {how}"
            raise SandboxFailed(f"{self.kind} could not start a container: {problem}", reason="start")
        try:
            first = _find_holder(self._runtime.pid)
            self._holder = Child(first)
            self._namespaces = namespaces.Namespaces(first)
            if not _is_holder(first, self._namespaces):
                raise SandboxFailed(f"a container of {self.kind} was not ready when it said so", reason="start")
            self._cgroups = make_cgroups(self.starts, self.spec.limits)
            self._cpus = () if QUOTA in self._cgroups.limits else _some_cpus(self.spec.limits.cpus)
            self._cgroups.add(first)
            self._limit(first, address_space=True)
            changes = [self._namespaces.close_devices]
            if self._namespaces.kinds & namespaces.USER:
                changes.append(self._namespaces.limit_inotify)
            for change in changes:
                if problem := _in_a_child(change, self._namespaces.descriptors):
                    words = f"a container cannot be closed to its commands: {problem}"
                    raise SandboxFailed(words, reason="start")
            variables = (PROC / str(first) / "environ").read_bytes().decode("utf-8", "surrogateescape")
            os.write(self._holder_input, b"\n")
            if not await _is_ready(ready, self._runtime, START_LIMIT_S):
                raise SandboxFailed(f"a container of {self.kind} ended as it started", reason="start")
        except OSError as error:
            raise SandboxFailed(f"a container of {self.kind} ended as it started: {error.strerror}") from error
        pairs = (variable.partition("=") for variable in variables.split("\0") if variable)
        self._environment = {name: value for name, _, value in pairs if not name.startswith(DROPPED_PREFIXES)}

    def _unlock_image(self) -> None:
        if self._image is not None:
            self._image.close()
            self._image = None

    def _forget_runtime(self) -> None:
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        if self._holder_input >= 0:
            os.close(self._holder_input)
            self._holder_input = -1
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None
        if self._cgroups is not None:
            self._cgroups.close()
            self._cgroups = None


def _some_cpus(number: float | None) -> Collection[int]:
    """Return that many of this process's processors; empty: all."""
    known = sorted(os.sched_getaffinity(0))
    return () if number is None or number > len(known) - 1 else random.sample(known, math.ceil(number))


def _in_a_child(change: Callable[[], None], kept: tuple[int, ...]) -> str:
    """Call a function in a forked child; return what went wrong, if anything did."""
    ours, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        forking.child(change, report, kept)
    os.close(report)
    _, _, problem = forking.read_report(ours)
    os.waitpid(pid, 0)
    return problem


def _find_holder(runtime: int) -> int:
    """Return the holder below a runtime, which may have other helpers, such as those that serve FUSE mounts."""
    for pid in descendants(runtime):
        with suppress(OSError):
            if (PROC / str(pid) / "comm").read_bytes().strip() == holder.NAME:
                return pid
    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))


def _is_holder(pid: int, inside: namespaces.Namespaces) -> bool:
    """Return whether a process is the holder, in a container of its own, after the change of its root."""
    wanted = namespaces.KINDS["mnt"] | namespaces.KINDS["pid"]
    try:
        changed = not os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))  # noqa: PTH116
    except PermissionError:
        changed = True  # it is a FUSE mount, which lets in only those of its own user namespace
    return (
        inside.kinds & wanted == wanted and (PROC / str(pid) / "comm").read_bytes().strip() == holder.NAME and changed
    )


def _is_in_a_namespace(pid: int) -> bool:
    """Return whether a child of this process is in a process namespace below this one's."""
    return len(_numbers(str(pid))) > len(_numbers("self"))


def _numbers(process: str) -> list[bytes]:
    """Return a process's numbers, one for each process namespace that it is seen in; none if it is gone."""
    with suppress(OSError):
        for line in (PROC / process / "status").read_bytes().splitlines():
            if line.startswith(b"NSpid:"):
                return line.split()[1:]
    return []


async def _is_ready(ready: int, runtime: Child, timeout_s: float) -> bool:
    """Wait for a line of the holder's; return whether it came before the runtime's end or the limit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()

    def read() -> None:
        loop.remove_reader(ready)
        if not answer.done():
            answer.set_result(os.read(ready, len(holder.READY)) == holder.READY)

    loop.add_reader(ready, read)
    runtime.when_ended(lambda: None if answer.done() else answer.set_result(False))
    try:
        await asyncio.wait((answer,), timeout=timeout_s)
    finally:
        loop.remove_reader(ready)
    return answer.done() and answer.result()
