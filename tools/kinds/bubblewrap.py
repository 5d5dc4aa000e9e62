"""Containers made by bubblewrap: without root, without an image if need be, in about 10 ms.

Inside are an image's directory or the host's /usr, read-only, a /tmp and the workspace, and nothing else of the host;
no network unless the spec asks for it, no capabilities, and a process namespace. Not supported: changes to the image
(bubblewrap before 0.11 has no overlays), SIF files, and being root inside.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from ..containers import seccomp
from ..containers.container import WORKSPACE
from ..containers.namespaced import NamespacedContainer
from ..processes.process_tree import first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "bwrap"
LINKED_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Links into /usr stay links inside; folders are bound."""
BOUND_READ_ONLY = ("/etc/alternatives", "/etc/ld.so.cache")
"""Debian's `awk` and others are links through /etc/alternatives."""
NETWORK_FILES = ("/etc/resolv.conf", "/etc/ssl", "/etc/nsswitch.conf")
OWN_FOLDERS = frozenset({"proc", "dev", "sys", "tmp", "run", "workspace"})
"""Folders of an image that the sandbox's own replace."""
USER_ID = "1000"
ETC = {
    "passwd": f"root:x:0:0::/:/usr/sbin/nologin\nagent:x:{USER_ID}:{USER_ID}::{WORKSPACE}:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{USER_ID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
PROBE_LIMIT_S = 10.0


class BubblewrapContainer(NamespacedContainer):
    kind = "bubblewrap"
    # It asks for its own death when its child needs it no more: before, that would wait for it for ever. Where nobody
    # is left to send it that, the holder ends at the end of its input.
    death_signal = 0

    @classmethod
    def problem(cls) -> str | None:
        if shutil.which(PROGRAM) is None:
            return (
                "bubblewrap is not installed; install the Debian package bubblewrap, or allow no isolation with "
                "--sandbox process"
            )
        try:
            probe = subprocess.run(
                [PROGRAM, *_FIXED, *_host_arguments(), *_OWN, "--", "true"],
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
                f"this machine refuses user namespaces ({reason}); allow them (sysctl "
                "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0, in a "
                "container its seccomp profile), or allow no isolation with --sandbox process"
            )
        return f"bubblewrap does not work here ({reason}); allow no isolation with --sandbox process"

    @classmethod
    def version(cls) -> str:
        return first_line([PROGRAM, "--version"]) or "works"

    def _runtime_argv(self, image: Path | None, passed: list[int]) -> list[str]:
        spec = self.spec
        if spec.fakeroot or spec.writable != "no":
            raise SandboxFailed(
                "bubblewrap has neither fakeroot nor a writable image; these need apptainer: --sandbox apptainer, or "
                'kind = "apptainer" in [sandbox]'
            )
        bound = [Path(bind.target) for bind in spec.binds]
        root = _image_arguments(image, bound) if image is not None else _host_arguments()
        arguments = [PROGRAM, *_FIXED, *root, *_OWN]
        if spec.network:
            arguments.append("--share-net")
            for path in NETWORK_FILES:
                arguments += ["--ro-bind-try", path, path]
        etc = self.path / "etc"
        etc.mkdir(0o755, exist_ok=True)
        for name, content in ETC.items():
            (etc / name).write_text(content)
            if image is None or (image / "etc" / name).is_file():
                arguments += ["--ro-bind", str(etc / name), f"/etc/{name}"]
        arguments += ["--bind", str(self.path / "shm"), "/dev/shm"]  # noqa: S108 - memory there would have no limit
        arguments += ["--bind", str(self.path / "tmp"), "/tmp", "--bind", str(self.workspace), WORKSPACE]  # noqa: S108
        for bind in spec.binds:
            arguments += ["--bind" if bind.writable else "--ro-bind", bind.source, bind.target]
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/"]
        if (program := seccomp.opened()) is not None:
            passed.append(program)
            arguments += ["--seccomp", str(program)]
        return [*arguments, "--chdir", "/", "--clearenv", "--"]


_FIXED = (
    *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"),
    *("--uid", USER_ID, "--gid", USER_ID, "--hostname", "sandbox"),
)
_OWN = ("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev")
"""Where the service runs as root, the command's user is root to the kernel and may write /proc/sys: with core_pattern
it could run a program on the host. A read-only /proc prevents that."""


@cache
def _host_arguments() -> tuple[str, ...]:
    """Return the arguments that show the host's own programs."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for folder in map(Path, LINKED_FOLDERS):
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    for path in BOUND_READ_ONLY:
        arguments += ["--ro-bind-try", path, path]
    return tuple(arguments)


def _image_arguments(image: Path, bound: Sequence[Path]) -> list[str]:
    """Return those that show an image entry by entry: in a read-only root no folder for the workspace can be made."""
    entries = sorted(each for each in image.iterdir() if each.name not in OWN_FOLDERS)
    return [word for entry in entries for word in _shown(entry, Path("/", entry.name), bound)]


def _shown(entry: Path, path: Path, bound: Sequence[Path]) -> list[str]:
    """Return those that show an entry, or, where it lacks a place for a bind, what is in it."""
    if entry.is_symlink():
        return ["--symlink", str(entry.readlink()), str(path)]
    below = [target.relative_to(path) for target in bound if target.is_relative_to(path)]
    if all((entry / each).exists() for each in below):
        return ["--ro-bind", str(entry), str(path)]
    return [
        "--dir",
        str(path),
        *(word for each in sorted(entry.iterdir()) for word in _shown(each, path / each.name, bound)),
    ]
