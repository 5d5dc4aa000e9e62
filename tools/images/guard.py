"""Runs a program and leaves none of its processes behind: `guard NAMESPACES [DESCRIPTOR …] [MOUNT …] -- PROGRAM …`.

Building programs start others (debootstrap starts dpkg, Apptainer a package manager), which outlive a killed parent. So
this process stands between the builder and them: it adopts orphans, and kills all of them when the program ends, or
when its standard input closes, which happens however the builder ends. It exits with the program's exit code. If the
guard itself is killed, the program dies with it, and orphans keep the build's lock, which they inherited.

Building programs of root get namespaces, so that they leave no mounts on the host and have the rights they need:

- `mount`: their mounts end with them. A build killed in debootstrap would leave /proc mounted in a folder that is
  removed next.
- `user`: also a user namespace in which the first 65,536 users and groups are themselves. Root of a container often
  lacks capabilities, without which Apptainer does not run `%post`; in its own namespace it has all. It cannot make
  devices there, so this is used only where needed (`root_lacks_capabilities`). With a map of all 2³² users Apptainer
  would take itself for the real root and mount what it may not.
- `contained`: for commands of an image, at mount points `TARGET=FOLDER` (see `contained`).
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Literal, cast

from ...system.processes import become_subreaper, die_with_parent
from ..processes.process_tree import descendants, kill
from .contained import PROXIES, contain
from .namespaces import NOT_STARTED, enter_user_namespace, own_mounts

Namespaces = Literal["none", "mount", "user", "contained"]


def main(namespaces: Namespaces, inherited: list[int], mounts: dict[str, str], argv: list[str]) -> int:
    become_subreaper()
    own_pid = os.getpid()

    def prepare() -> None:
        try:
            if namespaces == "contained":
                contain(own_pid, mounts)
                return
            _enter(namespaces)
        except OSError as error:
            advice = "allow user namespaces to root (/proc/sys/user/max_user_namespaces), or build as another user"
            os.write(1, f"no namespaces for {argv[0]}: {error}; {advice}\n".encode())
            os._exit(NOT_STARTED)
        die_with_parent(own_pid)

    try:
        program = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            pass_fds=() if namespaces == "contained" else inherited,
            env={name: value for name, value in os.environ.items() if name.lower() in PROXIES}
            if namespaces == "contained"
            else None,
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
        enter_user_namespace()
    own_mounts()


def root_lacks_capabilities() -> bool:
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    permitted = next(
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm:")
    )
    return os.geteuid() == 0 and int(permitted, 16) != (1 << (last + 1)) - 1


if __name__ == "__main__":
    _, chosen, *rest = sys.argv
    separator = rest.index("--")
    words, command = rest[:separator], rest[separator + 1 :]
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    sys.exit(main(cast("Namespaces", chosen), [int(word) for word in words if "=" not in word], pairs, command))
