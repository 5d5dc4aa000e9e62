"""Containers made by Apptainer (or Singularity, its former name): rootless, from directory images or SIF files.

They are made by `apptainer exec` with a process namespace of its own. An instance would outlive the process that
started it, and takes more than a second to stop. `spython` only reports whether the program runs: its `execute` has no
time limit and no input, and splits command lines at spaces.

Where the service runs as root, Apptainer makes no user namespace: commands have no capability, but are root to the
kernel as the owner of files. So parts of /proc are read-only for them, and there is no /sys.

Cgroups are not used: Apptainer sets them through systemd only. See `Limits` for what there is.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from ...errors import SandboxFailed
from ..containers import seccomp
from ..containers.container import WORKSPACE
from ..containers.namespaced import NamespacedContainer
from ..images.image import apptainer_program, default_root
from ..processes.process_tree import first_line

FUSE = "/dev/fuse"
NEEDS_FUSE = (
    "an ordinary user can change an image (jobs of task swe) with /dev/fuse and fuse-overlayfs, or where the run "
    "folder is on a disk that the kernel's own overlay takes, such as ext4, xfs or tmpfs"
)
WRITABLE_BY_ROOT = tuple(
    f"/proc/{name}" for name in ("sys", "bus", "irq", "fs", "acpi", "scsi", "mtrr", "pressure", "sysrq-trigger")
)
"""What root may write in /proc without any capability; see `proc(5)`."""


HOSTS = "/etc/hosts"


class ApptainerContainer(NamespacedContainer):
    kind = "apptainer"
    image_formats = frozenset({"directory", "sif"})
    changes_images = True
    # Killed, it would leave the process behind that serves a SIF file's filesystem; this signal lets it clean up.
    death_signal = signal.SIGTERM

    @classmethod
    def problem(cls) -> str | None:
        from spython.utils import get_singularity_version

        if apptainer_program() is None:
            return "apptainer is not installed; install it, or choose another kind with --sandbox bubblewrap"
        if not get_singularity_version():
            return "apptainer is installed but does not run; try `apptainer version`"
        return None

    @classmethod
    def version(cls) -> str:
        found = first_line([apptainer_program() or "", "--version"]) or "works"
        if os.geteuid() != 0 and not os.access(FUSE, os.R_OK | os.W_OK):
            return f"{found}; {FUSE} cannot be opened, so SIF files are unpacked once"
        return found

    def _runtime_argv(self, image: Path | None, passed: list[int]) -> list[str]:
        del passed  # it reads its filter from a file
        if image is None:
            raise SandboxFailed("apptainer needs an image; name one in the task or as the service's default (--image)")
        if (program := apptainer_program()) is None:
            raise SandboxFailed("apptainer is not installed")
        spec = self.spec
        root = os.geteuid() == 0
        arguments = [program, "--quiet", "exec", "--containall", "--no-init", "--no-home", "--no-eval"]
        arguments += ["--pwd", "/"]
        arguments += ["--no-mount", "bind-paths,sys" if root else "bind-paths"]  # of the host's files, only the task's
        arguments += _mount(str(self.workspace), WORKSPACE, writable=True)
        for target in ("/tmp", "/var/tmp"):  # noqa: S108 - the sandbox's own
            arguments += _mount(str(self.path / "tmp"), target, writable=True)
        arguments += _mount(str(self.path / "shm"), "/dev/shm", writable=True)  # noqa: S108 - memory has no limit there
        if not image.is_dir() or (image / HOSTS[1:]).is_file():
            arguments += _mount(self._hosts(), HOSTS, writable=spec.writable == "disk")
        profile = self.path / "seccomp.json"
        profile.write_bytes(msgspec.json.encode(seccomp.profile()))
        arguments += ["--security", f"seccomp:{profile}"]
        if not spec.network:
            arguments += ["--net", "--network", "none"]
        if root:
            arguments.append("--no-privs")
            for path in WRITABLE_BY_ROOT:
                if Path(path).exists():
                    arguments += _mount(path, path, writable=False)
        elif spec.fakeroot:
            arguments.append("--fakeroot")
            if Path(program).name == "apptainer":
                # Where the user has no subordinate ids, it would run the command below a program that pretends to
                # change owners; commands that join would not be below it.
                arguments.append("--ignore-fakeroot-command")
        if spec.writable == "disk":
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

    def _hosts(self) -> str:
        """Return the path of the sandbox's own /etc/hosts: that of an image is empty, and `localhost` unknown."""
        path = self.path / "hosts"
        if not path.exists():  # a container that is started again keeps what its commands wrote
            path.write_text(f"127.0.0.1 localhost {os.uname().nodename}\n::1 ip6-localhost ip6-loopback\n")
            path.chmod(0o644)
        return str(path)

    def _explained(self, words: str) -> str:
        if "fuse" not in words or self.spec.writable == "no":
            return words
        return f"{words}; {NEEDS_FUSE}"


def _mount(source: str, target: str, *, writable: bool) -> list[str]:
    """Return the option that binds a path, quoted as CSV is: `--bind` takes no colon or comma in a path."""
    fields = ["type=bind", f"source={source}", f"destination={target}", *([] if writable else ["ro"])]
    return ["--mount", ",".join('"' + field.replace('"', '""') + '"' for field in fields)]
