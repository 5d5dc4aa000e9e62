"""Hosts in namespaces of this machine, each with an address, a name and a /tmp of its own.

They share folders, as hosts of a cluster share a file system, and a switch. A host ends with all its processes when
the first process of its pid namespace is killed; its link can be cut, which takes what is between it and the others
and says nothing to either side. All ends with the context. It needs root.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prorl_zmq.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CLONE_NEWNET = 0x40000000
ROOT = Path(__file__).resolve().parents[1]
BEGIN = """
set -e
hostname {name}
mount -t tmpfs tmpfs /mnt
n=0
for path in {shared}; do n=$((n + 1)); mkdir /mnt/$n; mount --rbind $path /mnt/$n; done
for path in {hidden}; do mount -t tmpfs -o mode=1777 tmpfs $path; done
n=0
for path in {shared}; do n=$((n + 1)); mkdir -p $path; mount --rbind /mnt/$n $path; done
umount -l /mnt
{more}
ip link set lo up
echo
while true; do sleep 3600 & wait; done
"""
"""It ends with a shell: the first process of a pid namespace has to reap the others' orphans."""


class Hosts:
    """None at first; `begin` adds one.

    Args:
        shared: folders that all of them see, beside this checkout and the interpreter.
        hidden: folders of which they see nothing else.
        more: a line of shell that each begins with.
        log: a file for what their programs say; None: nothing is kept.
    """

    def __init__(
        self, *shared: Path, hidden: Sequence[str] = ("/tmp",), more: str = "", log: Path | None = None
    ) -> None:
        self._shared = dict.fromkeys(map(str, (*shared, ROOT, Path(sys.prefix), Path(sys.base_prefix))))
        self._hidden = hidden
        self._more = more
        self._log = log
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        """The process outside of each host's pid namespace, whose end ends the host."""
        self._first: dict[str, int] = {}
        """The first process inside, as it is called outside."""

    def __enter__(self) -> Self:
        self._switch = self._holder("--net", script="echo; exec sleep infinity")
        try:
            self._ip("link", "add", "bridge", "type", "bridge")
            self._ip("link", "set", "bridge", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in tuple(self._first):
            self.kill(name)
        self._switch.kill()
        self._switch.wait()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._first)

    def begin(self, name: str, address: str) -> None:
        """Add a host, at an address of the network 10.0.0.0/8."""
        spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        script = BEGIN.format(name=name, shared=" ".join(self._shared), hidden=" ".join(self._hidden), more=self._more)
        self._holders[name] = self._holder(*spaces, "--propagation", "private", script=script)
        outer = self._holders[name].pid
        first = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]
        self._first[name] = int(first)
        self._ip("link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", first)
        self._ip("link", "set", f"to-{name}", "master", "bridge", "up")
        for words in (("address", "add", f"{address}/16", "dev", "eth0"), ("link", "set", "eth0", "up")):
            subprocess.run([*self.prefix(name), "ip", *words], check=True)

    def prefix(self, name: str) -> Sequence[str]:
        """Return what to put before a command that runs on a host."""
        return ("nsenter", f"--target={self._first[name]}", "--net", "--mount", "--uts", "--ipc", "--pid", "--wd=/")

    @contextmanager
    def network(self, name: str) -> Iterator[None]:
        """Be in a host's network: this thread, and all threads that it starts."""
        with (
            Path("/proc/thread-self/ns/net").open() as here,
            Path(f"/proc/{self._first[name]}/ns/net").open() as there,
        ):
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def kill(self, name: str) -> None:
        """Take a host's power: all its processes end, and its link with it."""
        os.kill(self._first.pop(name), signal.SIGKILL)
        self._holders.pop(name).wait()

    def kill_processes(self, name: str) -> None:
        """Kill all processes of a host at once; the host stays, and refuses connections."""
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def signal(command: subprocess.Popen[bytes], number: int) -> None:
        """Send a signal to a command that was started with `prefix`."""
        (inside,) = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        os.kill(int(inside), number)

    def cut(self, name: str) -> None:
        self._ip("link", "set", f"to-{name}", "down")

    def processes(self, name: str) -> list[int]:
        """Return the pids of a host's processes, but for the first."""
        namespace = Path(f"/proc/{self._first[name]}/ns/pid").readlink()
        found = []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdigit() and (process / "ns/pid").readlink() == namespace:
                    found.append(int(process.name))
        return [pid for pid in found if pid != self._first[name]]

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["nsenter", f"--net=/proc/{self._switch.pid}/ns/net", "ip", *arguments], check=True)

    def _holder(self, *spaces: str, script: str) -> subprocess.Popen[bytes]:
        """Start what holds namespaces, and wait until it says that they are there."""
        with open(self._log or os.devnull, "ab") as log:  # noqa: PTH123 - either
            holder = subprocess.Popen(
                ("unshare", *spaces, "bash", "-c", script),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        assert holder.stdout is not None
        with holder.stdout:
            if holder.stdout.readline() != b"\n":
                raise OSError("no namespaces can be made here")
        return holder


def _enter(network: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a host's network cannot be entered")
