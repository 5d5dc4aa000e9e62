"""Runs a program and leaves none of its processes behind: `guard NAMESPACES [DESCRIPTOR …] -- PROGRAM …`, a process.

Building programs start others (debootstrap starts dpkg, Apptainer a package manager), which outlive a parent that is
killed. So this process stands between the builder and them: orphans become its children, and it kills all of them when
the program ends, or when its standard input closes, which happens however the builder ends. It exits with the
program's exit code.

Left out on purpose: being killed itself. Then the program dies with it, and orphans keep the build's lock, which they
inherited, so that no other builder touches the folder they write to until they end.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING, cast

from ...system.processes import become_subreaper, die_with_parent
from ..processes import descendants, kill
from .private_namespaces import enter

if TYPE_CHECKING:
    from .private_namespaces import Namespaces

NOT_STARTED = 127


def main(namespaces: Namespaces, inherited: list[int], argv: list[str]) -> int:
    become_subreaper()
    own_pid = os.getpid()

    def prepare() -> None:
        try:
            enter(namespaces)
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


if __name__ == "__main__":
    _, chosen, *rest = sys.argv
    separator = rest.index("--")
    sys.exit(main(cast("Namespaces", chosen), [int(each) for each in rest[:separator]], rest[separator + 1 :]))
