"""Containers of guarded programs: commands of an image, which may be hostile, for a build by root.

They see the root of the image (the mount at `/`), with folders at targets below `/.prorl`, and nothing else of the
host's files. They are root of a user namespace in which the first 65,536 users and groups are themselves, so they own
files as in any image, but cannot make or open devices, mount disks, and trace or signal the host's processes. Since
they still own root's files, those of the kernel are closed to them before they enter a second user namespace, whose
root cannot undo that: /proc/sys and the like are read-only, /sys is empty, /dev has harmless devices. The network is
the host's.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

from ...system.processes import die_with_parent
from .namespaces import NOT_STARTED, call, enter_user_namespace, own_mounts

CLONE_NEWPID = 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 0x4000
MNT_DETACH = 2
KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME | os.ST_RELATIME
"""Flags of a mount that no process may clear in a user namespace; most have the same numbers for `mount`."""
READ_ONLY = ("acpi", "bus", "fs", "irq", "scsi", "sys", "sysrq-trigger")
"""What root can change the kernel with, below /proc."""
DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
HOSTS = ("resolv.conf", "hosts")
"""By these files of /etc programs find other hosts."""
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
"""The only variables of the host that commands of an image see, as with Docker; in capitals too."""
OLD_ROOT = "/.prorl/old"
"""Where the host's files are while the container is made; a folder of the mount at `/.prorl`."""


def contain(guard: int, mounts: dict[str, str]) -> None:
    """Go on in a child of this process that is contained; this process waits for it, and exits with its code."""
    enter_user_namespace()
    call("unshare", CLONE_NEWPID)
    parent = os.pidfd_open(os.getpid())
    child = os.fork()
    if child:
        os.closerange(3, 65536)  # Popen waits until all copies are closed
        die_with_parent(guard)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    own_mounts()
    _change_root(mounts)
    _close_kernel()
    call("umount2", OLD_ROOT.encode(), MNT_DETACH)
    _name_hosts()
    enter_user_namespace()
    own_mounts()
    die_with_parent()
    if select.select([parent], [], [], 0)[0]:
        os._exit(NOT_STARTED)  # the parent died before the kernel knew
    os.close(parent)


def _change_root(mounts: dict[str, str]) -> None:
    """Make an image's root this process's. The targets are below a folder of ours, so no link in the image matters."""
    root = mounts["/"]
    for target, source in mounts.items():
        place = root if target == "/" else f"{root}{target}"
        _mount(source, place, MS_BIND)
        if target.count("/") > 1:
            _make_read_only(place)
    os.chdir(root)
    call("pivot_root", b".", OLD_ROOT[1:].encode())
    os.chdir("/")


def _close_kernel() -> None:
    """Mount /proc, /dev and /sys, through which nothing of the host can be changed."""
    for name in ("proc", "dev", "sys"):
        with suppress(FileExistsError):
            Path("/", name).mkdir(0o755)
    try:
        call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    except OSError:  # refused in a container whose own /proc is partly hidden
        _mount(f"{OLD_ROOT}/proc", "/proc", MS_BIND | MS_REC)
    for name in READ_ONLY:
        if Path("/proc", name).exists():
            _mount(f"/proc/{name}", f"/proc/{name}", MS_BIND | MS_REC)
            _make_read_only(f"/proc/{name}")
    call("mount", b"tmpfs", b"/dev", b"tmpfs", MS_NOSUID, b"mode=755,size=64m")
    for name in DEVICES:
        Path("/dev", name).touch()
        _mount(f"{OLD_ROOT}/dev/{name}", f"/dev/{name}", MS_BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        Path("/dev", name).symlink_to(f"/proc/self/fd/{number}")
    Path("/dev/fd").symlink_to("/proc/self/fd")
    Path("/dev/ptmx").symlink_to("pts/ptmx")
    for name in ("pts", "shm"):
        Path("/dev", name).mkdir()
    Path("/dev", "shm").chmod(0o1777)
    call("mount", b"devpts", b"/dev/pts", b"devpts", MS_NOSUID | MS_NOEXEC, b"newinstance,ptmxmode=0666,mode=620")
    call("mount", b"tmpfs", b"/sys", b"tmpfs", MS_RDONLY, b"mode=755")


def _name_hosts() -> None:
    """Show the files of `HOSTS` from the folder at `/.prorl`."""
    for name in HOSTS:
        target = Path("/etc", name)
        with suppress(OSError):  # the image has no /etc, or a link to nowhere: it does not resolve names
            if not target.is_symlink():
                target.touch()
            _mount(f"/.prorl/{name}", str(target), MS_BIND)


def _mount(source: str, target: str, flags: int) -> None:
    call("mount", os.fsencode(source), os.fsencode(target), None, flags, None)


def _make_read_only(target: str) -> None:
    kept = os.statvfs(target).f_flag & KEPT_FLAGS
    call("mount", None, os.fsencode(target), None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, None)
