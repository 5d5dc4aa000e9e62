"""The sides of bench/sandbox.py: kinds of sandbox on one root filesystem, each with its bare container command.

The root filesystem is the host's own /usr, or a Debian as `prorl image build` makes it (a minute, once per machine, by
debootstrap and root; tests/rootfs.py uses the same one), as a directory and as a SIF file.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_zmq.errors import ProrlError
from prorl_zmq.tools.containers.kinds import problem_with
from prorl_zmq.tools.containers.specification import Bind, SandboxSpec
from prorl_zmq.tools.images.image import APPTAINER_PROGRAMS
from prorl_zmq.tools.images.image_store import ImageStore
from prorl_zmq.tools.kinds.apptainer import FUSE

if TYPE_CHECKING:
    from prorl_zmq.wire.messages.jobs import SandboxKind

HOST, IMAGE, DIRECTORY, SIF, PLAIN = (
    "bubblewrap, host's /usr",
    "bubblewrap, image",
    "Apptainer, directory image",
    "Apptainer, SIF",
    "plain process",
)
PACKAGES = str(Path(importlib.util.find_spec("IPython").origin).parents[1])  # type: ignore[union-attr, arg-type]
IN_IMAGE = "/mnt"
"""Where an image sees these packages: every image has that folder."""
BUILD_LIMIT_S = 600.0
WORDS = 200
"""Most characters of a problem that are shown."""


@dataclass(frozen=True)
class Side:
    """A kind of sandbox, and its peer."""

    name: str
    kind: SandboxKind
    bare: tuple[str, ...]
    """The bare container command; a program and its arguments follow."""
    target_ms: float | None = None
    """For a new sandbox's first command."""
    spec: SandboxSpec = SandboxSpec()  # noqa: RUF009  (it is frozen)
    python: str = ""
    cells_every: int = 5
    """In which of the rounds an IPython is inside: to start it takes longer than all the rest."""


def find_sides(folder: Path, *, build: bool) -> tuple[list[Side], dict[str, str]]:
    """Give what this machine can make, and of the rest why not.

    Args:
        folder: for a SIF file.
        build: build a root filesystem where there is none yet.
    """
    sides = [Side(PLAIN, "process", (), spec=SandboxSpec(environment={"PYTHONPATH": PACKAGES}))]
    missing: dict[str, str] = {}
    image, no_image = root_filesystem(build=build)
    packages = SandboxSpec(image=image, binds=(Bind(PACKAGES, IN_IMAGE),), environment={"PYTHONPATH": IN_IMAGE})
    if problem := problem_with("bubblewrap"):
        missing |= {HOST: problem, IMAGE: problem}
    else:
        sides.append(Side(HOST, "bubblewrap", _bubblewrap("/"), 60, host_spec(), sys.executable, 1))
        if image:
            sides.append(Side(IMAGE, "bubblewrap", _bubblewrap(image), None, packages, "python3"))
        else:
            missing[IMAGE] = no_image
    problem = problem_with("apptainer") or no_image
    if problem:
        return sides, missing | {DIRECTORY: problem, SIF: problem}
    program = next(filter(shutil.which, APPTAINER_PROGRAMS))
    bare = (program, "--quiet", "exec", "--containall", "--net", "--network", "none")
    bare += ("--no-privs",) if os.geteuid() == 0 else ()
    sides.append(Side(DIRECTORY, "apptainer", (*bare, image), 350, packages, "python3", 1))
    sif = folder / "image.sif"
    squash = ("--mksquashfs-args", "-comp zstd -Xcompression-level 3")
    command = [program, "--quiet", "build", *squash, str(sif), image]
    built = subprocess.run(command, capture_output=True, timeout=BUILD_LIMIT_S, check=False)
    if built.returncode:
        return sides, missing | {SIF: f"it cannot be built: {words_of(built.stderr)}"}
    fuse = os.access(FUSE, os.R_OK | os.W_OK) or os.geteuid() == 0
    bare += () if fuse else ("--unsquash",)
    spec = SandboxSpec(str(sif), packages.binds, packages.environment)
    sides.append(Side(SIF, "apptainer", (*bare, str(sif)), 450, spec, "python3"))
    return sides, missing


def host_spec() -> SandboxSpec:
    """Show the packages and the interpreter of this process, where they are not in the host's /usr."""
    shown = {PACKAGES, sys.prefix, sys.base_prefix}
    binds = tuple(Bind(path, path) for path in sorted(shown) if not path.startswith("/usr"))
    return SandboxSpec(binds=binds, environment={"PYTHONPATH": PACKAGES})


def root_filesystem(*, build: bool) -> tuple[str, str]:
    """Give a Debian's root filesystem with Python, as a directory; or nothing, and why.

    Args:
        build: build it where there is none yet.
    """
    store = ImageStore(Path(tempfile.gettempdir()) / "prorl-test-rootfs")
    name = f"debian-{os.uname().machine}"
    found = store.find(name)
    if found is not None and found.path.stat().st_uid in (0, os.geteuid()):
        return str(found.path), ""
    if not build:
        return "", "no root filesystem yet: run without --quick, as root"
    try:
        store.root.mkdir(0o755, exist_ok=True)
        suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")
        return str(store.build(f"debootstrap://{suite}?include=python3&variant=minbase", name).image.path), ""
    except (OSError, ProrlError) as error:
        return "", f"no root filesystem: {words_of(str(error).encode())}"


def words_of(output: bytes) -> str:
    """Give the last line of what a program said, or the beginning of it."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:WORDS] if lines else "it said nothing"


def _bubblewrap(root: str) -> tuple[str, ...]:
    fixed = ("bwrap", "--unshare-all", "--die-with-parent")
    return (*fixed, "--ro-bind", root, "/", "--proc", "/proc", "--dev", "/dev")
