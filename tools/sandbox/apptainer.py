"""Containers made by Apptainer (or Singularity, as it was called): rootless, from directory images or SIF files.

`exec` with a process namespace of its own, not an instance: an instance outlives whoever started it, and takes more
than a second to stop. `spython` is used for what it is good at, to find the program and its version; its `execute` has
no time limit, no input, and splits command lines at spaces.

Where the service runs as root, Apptainer makes no user namespace, so commands are root to the kernel: without any
capability, but as the owner of what root owns. Hence parts of /proc are read-only for them, and there is no /sys.

Cgroups are not used: Apptainer sets them through systemd only. See `Limits` for what there is.
"""

from __future__ import annotations

import os
import shutil
import signal
from functools import cache
from pathlib import Path

import msgspec

from ...errors import SandboxFailed
from ..images.image import default_root
from . import seccomp
from .namespaced import WORKSPACE, NamespacedContainer

PROGRAMS = ("apptainer", "singularity")
FUSE = "/dev/fuse"
ROOTS_PLACES = tuple(
    f"/proc/{name}" for name in ("sys", "bus", "irq", "fs", "acpi", "scsi", "mtrr", "pressure", "sysrq-trigger")
)
"""What root may write in /proc without any capability; see `proc(5)`."""


class ApptainerContainer(NamespacedContainer):
    """A container whose runtime is Apptainer."""

    kind = "apptainer"
    # Killed, it would leave the process behind that serves a SIF file's filesystem; this signal lets it clean up.
    death_signal = signal.SIGTERM

    def _runtime_argv(self, image: Path | None, passed: list[int]) -> list[str]:
        del passed  # it reads its filter from a file
        if image is None:
            raise SandboxFailed("apptainer needs an image; name one in the task or as the service's default (--image)")
        spec = self.spec
        root = os.geteuid() == 0
        arguments = [_program(), "--quiet", "exec", "--containall", "--no-home", "--no-eval", "--pwd", "/"]
        arguments += [
            "--no-mount",
            "bind-paths,sys" if root else "bind-paths",
        ]  # of the host's files, only the task's own
        arguments += _mount(str(self.workspace), WORKSPACE, writable=True)
        for place in ("/tmp", "/var/tmp"):  # noqa: S108 - the sandbox's own
            arguments += _mount(str(self.path / "tmp"), place, writable=True)
        arguments += _mount(str(self.path / "shm"), "/dev/shm", writable=True)  # noqa: S108 - memory has no limit there
        profile = self.path / "seccomp.json"
        profile.write_bytes(msgspec.json.encode(seccomp.profile()))
        arguments += ["--security", f"seccomp:{profile}"]
        if not spec.network:
            arguments += ["--net", "--network", "none"]
        if root:
            arguments.append("--no-privs")
            for place in ROOTS_PLACES:
                if Path(place).exists():
                    arguments += _mount(place, place, writable=False)
        elif spec.fakeroot:
            arguments.append("--fakeroot")
        if spec.writable == "memory":
            arguments.append("--writable-tmpfs")
        elif spec.writable == "disk":
            overlay = self.path / "overlay"
            overlay.mkdir(0o755, exist_ok=True)
            arguments += ["--overlay", str(overlay)]
        for bind in spec.binds:
            arguments += _mount(bind.source, bind.target, writable=bind.writable)
        if image.is_file() and not root and not os.access(FUSE, os.R_OK | os.W_OK):
            # Without FUSE a user cannot mount it, and unpacking it for each container would take seconds.
            from ..images.unpacking import unpacked  # brings all of image building with it

            image = unpacked(image, default_root().parent / "unpacked")
        return [*arguments, str(image)]


def apptainer_problem() -> str | None:
    """Give why Apptainer cannot be used on this machine and what to do; None if it is installed and runs. Blocks."""
    from spython.utils import get_singularity_version

    if not any(map(shutil.which, PROGRAMS)):
        return "apptainer is not installed; install it, or choose another kind with --sandbox bubblewrap"
    version = get_singularity_version()
    if not version:
        return "apptainer is installed but does not run; try `apptainer version`"
    return None


def _mount(source: str, target: str, *, writable: bool) -> list[str]:
    """Give the option that binds a path, quoted as CSV is: `--bind` takes no colon or comma in a path."""
    fields = ["type=bind", f"source={source}", f"destination={target}", *([] if writable else ["ro"])]
    return ["--mount", ",".join('"' + field.replace('"', '""') + '"' for field in fields)]


@cache
def _program() -> str:
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    raise SandboxFailed("apptainer is not installed")
