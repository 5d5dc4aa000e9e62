"""Runs a program and leaves none of its processes behind: `guard NAMESPACES [DESCRIPTOR …] -- PROGRAM …`, a process.

Building programs start others (debootstrap starts dpkg, Apptainer a package manager), which outlive a killed parent. So
this process stands between the builder and them: it adopts orphans, and kills all of them when the program ends, or
when its standard input closes, which happens however the builder ends. It exits with the program's exit code. If the
guard itself is killed, the program dies with it, and orphans keep the build's lock, which they inherited.

Building programs of root get namespaces, so that they leave no mounts on the host and have the rights they need:

- `mount`: their mounts end with them. A build killed in debootstrap would leave /proc mounted in a folder that is
removed next. - `user`: also a user namespace in which the first 65,536 users and groups are themselves. Root of a
container often lacks capabilities, without which Apptainer does not run `%post`; in its own namespace it has all. It
cannot make devices there, so this is used only where needed (`root_lacks_capabilities`). With a map of all 2³² users
Apptainer would take itself for the real root and mount what it may not.
"""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Literal, cast

from ...system.processes import become_subreaper, die_with_parent
from ..processes.process_tree import descendants, kill

Namespaces = Literal["none", "mount", "user"]

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
IDS = 65536
NOT_STARTED = 127


def main(namespaces: Namespaces, inherited: list[int], argv: list[str]) -> int:
    become_subreaper()
    own_pid = os.getpid()

    def prepare() -> None:
        try:
            _enter(namespaces)
        except OSError as error:
            os.write(1, f"no namespaces for {argv[0]}: {error}\n".encode())
            os._exit(NOT_STARTED)
        die_with_parent(own_pid)

    try:
        program = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
            preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
        )
    except OSError as error:
        print(f"{argv[0]} does not start: {error.strerror}")
        return NOT_STARTED
    watched = select.poll()
    watched.register(os.pidfd_open(program.pid), select.POLLIN)
    watched.register(sys.stdin.fileno(), select.POLLIN)
    watched.poll()
    if program.poll() is None:
        program.kill()
    code = program.wait()
    end_all(own_pid)
    return code if code >= 0 else 128 - code


def end_all(pid: int) -> None:
    while True:
        kill(*descendants(pid))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _enter(namespaces: Namespaces) -> None:
    """Move this process, which has one thread, into new namespaces."""
    if namespaces == "none":
        return
    if namespaces == "user":
        _enter_user_namespace()
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def root_lacks_capabilities() -> bool:
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    permitted = next(
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm:")
    )
    return os.geteuid() == 0 and int(permitted, 16) != (1 << (last + 1)) - 1


def _enter_user_namespace() -> None:
    """Only a process outside may write such a map, so a child that stays there does."""
    entered, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(tell)
        code = 1
        try:
            if os.read(entered, 1):
                for kind in ("uid_map", "gid_map"):
                    Path(f"/proc/{os.getppid()}/{kind}").write_text(f"0 0 {IDS}\n")
                code = 0
        finally:
            os._exit(code)
    os.close(entered)
    try:
        _call("unshare", CLONE_NEWUSER)
        os.write(tell, b"1")
    finally:
        os.close(tell)
        _, status = os.waitpid(writer, 0)
    if status != 0:
        raise OSError("the users of a namespace could not be set")


def _call(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


if __name__ == "__main__":
    _, chosen, *rest = sys.argv
    separator = rest.index("--")
    sys.exit(main(cast("Namespaces", chosen), [int(each) for each in rest[:separator]], rest[separator + 1 :]))
