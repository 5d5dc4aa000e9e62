"""Builds a source into a folder or a SIF file, by other programs: apptainer, debootstrap, cp.

A folder or a debootstrap first becomes a raw root filesystem, without the content of /dev, /proc and /sys: an
unprivileged user may not copy device nodes, and every container brings its own. Then Apptainer adds its own files to a
copy of it (without them it starts no instances) or packs it. Where Apptainer is not installed the raw one is the image,
which is all that bubblewrap needs.

Apptainer's command line is used, not spython's `build`: that calls sudo by default and returns None on failure. Not
supported: fakeroot for debootstrap, which is slow and needs packages of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...errors import ConfigError, SandboxFailed, SandboxUnavailable
from .definition import Definition
from .dockerfile_build import DockerfileBuild
from .fingerprint import NOT_PART, file_digest
from .guard import root_lacks_capabilities
from .image import apptainer_program, read_manifest
from .kept_folder import remove
from .program import run_program
from .sources import ArchiveSource, DebootstrapSource, DirectorySource, DockerfileSource, RegistrySource, SifSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .guard import Namespaces
    from .image import Format
    from .sources import Base, Source

RECIPE_VERSION = 1
"""Raised when images are built in another way, so that existing ones are rebuilt."""
FILE_NAMES: dict[Format, str] = {"directory": "rootfs", "sif": "image.sif"}
COMPRESSION = ("--mksquashfs-args", "-comp zstd -Xcompression-level 3")
"""4 s for 170 MB, where gzip, the default, takes 26 to 39 s (measured)."""
MAKE_DEVICES = frozenset({"debootstrap", "yum", "dnf", "zypper", "arch", "busybox"})
"""Bootstrap agents that need the real root."""
SQUASHFS = re.compile(r"\|(\d+)-\d+ *\|FS \(Squashfs/\*System")
"""Where the root filesystem begins, in bytes, in the table of contents of a SIF file."""
LINES_KEPT = 100
APT_LIMIT_S = 30.0


@dataclass
class Builder:
    folder: Path
    """Empty; the image and all temporary files go there."""
    lock: int
    """A descriptor that programs inherit (see `kept_folder`)."""
    timeout_s: float
    """For all programs together."""
    heard: Callable[[str], None]
    """Called with each line that a program prints."""

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.timeout_s

    def build(self, source: Source, format_: Format) -> Path:
        target = self.folder / FILE_NAMES[format_]
        (self.folder / "tmp").mkdir(0o700)
        match source:
            case DirectorySource(path):
                self._pack(self._copy(path), target, format_)
            case DebootstrapSource():
                self._pack(self._debootstrap(source), target, format_)
            case Definition():
                file = self.folder / "image.def"
                file.write_text(source.text)
                self._apptainer(target, format_, str(file), _namespaces(source), source.path.parent)
            case SifSource(path):
                self._from_sif(path, target, format_)
            case RegistrySource() | ArchiveSource():
                self._apptainer(target, format_, str(source))
            case DockerfileSource():
                contained = (self._copy_base, self._run_contained) if os.geteuid() == 0 else None
                raw = DockerfileBuild(self.folder, source, self._build_stage, contained).run()
                if format_ == "directory":
                    raw.rename(target)
                else:
                    self._pack(raw, target, format_)
        remove(self.folder / "tmp")
        return target

    def _build_stage(self, target: Path, source: str, binds: Sequence[str], folder: Path) -> None:
        self._apptainer(target, "directory", source, _run_namespaces(), folder, binds)

    def _copy_base(self, target: Path, source: Base | Path) -> None:
        match source:
            case Path():
                self._run(
                    ["cp", "--archive", "--reflink=auto", "--no-target-directory", "--", str(source), str(target)]
                )
            case SifSource(path):
                self._from_sif(path, target, "directory")
            case _:
                self._apptainer(target, "directory", str(source))

    def _run_contained(self, script: str, mounts: Mapping[str, Path]) -> None:
        self._run(["/bin/sh", script], "contained", mounts=mounts)

    def _copy(self, source: Path) -> Path:
        if self.folder.resolve().is_relative_to(source.resolve()):
            raise ConfigError(f"the images are kept inside {source}; keep them elsewhere with --images", key="images")
        raw = self._raw()
        entries = [str(entry) for entry in source.iterdir() if entry.name not in NOT_PART]
        self._run(["cp", "--archive", "--reflink=auto", "--target-directory", str(raw), "--", *entries])
        return raw

    def _debootstrap(self, source: DebootstrapSource) -> Path:
        if shutil.which("debootstrap") is None:
            raise SandboxUnavailable("debootstrap is not installed; install its package", kind="debootstrap")
        raw = self.folder / "raw"
        arguments = ["--variant", source.variant] if source.variant != "standard" else []
        if source.include:
            arguments += ["--include", ",".join(source.include)]
        mirror = source.mirror or _configured_mirror(source.suite)
        positional = [source.suite, str(raw), *filter(None, [mirror])]
        try:
            self._run(["debootstrap", *arguments, *positional], "mount", private=mirror)
        except SandboxFailed as error:
            log = raw / "debootstrap" / "debootstrap.log"
            words = _hidden(_tail(log), mirror) if log.is_file() else ""
            raise SandboxFailed(f"{error.message}{' / ' if words else ''}{words}", **error.fields) from error
        for package in (raw / "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        return self._without_devices(raw)

    def _from_sif(self, sif: Path, target: Path, format_: Format) -> None:
        table = check_sif_content(sif, self._run)
        if format_ == "sif":
            self._run(["cp", "--reflink=auto", "--", str(sif), str(target)])
        elif os.geteuid() == 0 and (found := next(filter(None, map(SQUASHFS.search, table)), None)):
            # Apptainer unpacks in a container, where root may lack what it needs to give files to their owners.
            raw = self.folder / "raw"
            self._run(["unsquashfs", "-quiet", "-no-progress", "-offset", found[1], "-dest", str(raw), str(sif)])
            self._without_devices(raw).rename(target)
        else:
            self._apptainer(target, format_, str(sif))

    def _without_devices(self, raw: Path) -> Path:
        for name in NOT_PART:
            remove(raw / name)
        return self._raw()

    def _raw(self) -> Path:
        raw = self.folder / "raw"
        for path in (raw, *(raw / name for name in NOT_PART)):
            path.mkdir(0o755, exist_ok=True)
        return raw

    def _pack(self, raw: Path, target: Path, format_: Format) -> None:
        if maker_of_raw(format_) == "copy":
            raw.rename(target)
            return
        self._apptainer(target, format_, str(raw))
        remove(raw)

    def _apptainer(
        self,
        target: Path,
        format_: Format,
        source: str,
        namespaces: Namespaces = "none",
        folder: Path | None = None,
        binds: Sequence[str] = (),
    ) -> None:
        flags = list(COMPRESSION) if format_ == "sif" else ["--sandbox"]
        if format_ == "directory" and os.geteuid() != 0:
            flags.append("--fix-perms")  # or its owner cannot remove it
        flags += [word for bind in binds for word in ("--bind", bind)]
        self._run([apptainer(), "--nocolor", "build", *flags, str(target), source], namespaces, folder=folder)

    def _run(
        self,
        argv: list[str],
        namespaces: Namespaces = "none",
        *,
        folder: Path | None = None,
        private: str = "",
        mounts: Mapping[str, Path] | None = None,
    ) -> Sequence[str]:
        lines: deque[str] = deque(maxlen=LINES_KEPT)

        def heard(line: str) -> None:
            lines.append(line)
            self.heard(_hidden(line, private))

        temporary = str(self.folder / "tmp")
        # Temporary files of a killed program must be where the next build removes them.
        names = ("TMPDIR", "APPTAINER_TMPDIR", "SINGULARITY_TMPDIR")
        environment = {**os.environ, **dict.fromkeys(names, temporary), "LC_ALL": "C.UTF-8"}
        try:
            run_program(
                argv,
                folder=folder or self.folder,
                environment=environment,
                timeout_s=max(0.0, self._deadline - time.monotonic()),
                heard=heard,
                inherited=(self.lock,),
                namespaces=namespaces,
                mounts=mounts,
            )
        except SandboxFailed as error:
            raise SandboxFailed(_hidden(error.message, private), **error.fields) from None
        return lines


def ignore_line(line: str) -> None:
    del line


def check_possible(source: Source, format_: Format) -> str:
    """Return what will put the image together: `apptainer`, or `copy`."""
    if isinstance(source, DebootstrapSource) and os.geteuid() != 0:
        raise SandboxUnavailable(
            f"{source} needs root, because debootstrap changes roots and makes devices; run it as root, or build from "
            "docker://, a definition or a folder",
            kind="debootstrap",
        )
    if isinstance(source, DebootstrapSource | DirectorySource):
        return maker_of_raw(format_)
    apptainer()
    return "apptainer"


def maker_of_raw(format_: Format) -> str:
    if format_ == "directory" and apptainer_program() is None:
        return "copy"
    apptainer()
    return "apptainer"


def apptainer() -> str:
    if found := apptainer_program():
        return found
    raise SandboxUnavailable(
        "Apptainer is not installed, and this needs it; install the package apptainer. Without it, directory images "
        "can be built from folders and debootstrap://",
        kind="apptainer",
    )


def check_sif_content(sif: Path, run: Callable[[list[str]], Sequence[str]]) -> Sequence[str]:
    """Check that a SIF file is unchanged since it was built, as far as known; return its table of contents.

    Apptainer would run a file without such a table as a definition.
    """
    with suppress(OSError, msgspec.MsgspecError):  # without a manifest it is not ours
        wanted = read_manifest(sif).sif_digest
        if wanted and file_digest(sif) != wanted:
            raise SandboxFailed(f"{sif} is corrupt: its content is not what was built; build it again", path=str(sif))
    try:
        return run([apptainer(), "--nocolor", "sif", "list", str(sif)])
    except SandboxFailed as error:
        raise SandboxFailed(f"{sif} is corrupt: Apptainer cannot read its table of contents", path=str(sif)) from error


def _namespaces(definition: Definition) -> Namespaces:
    if os.geteuid() == 0 and any(agent in MAKE_DEVICES for agent, _ in definition.bases):
        return "mount"
    return _run_namespaces()


def _run_namespaces() -> Namespaces:
    """Return those in which Apptainer can run commands of an image that it builds."""
    if os.geteuid() != 0:
        return "none"
    return "user" if root_lacks_capabilities() else "mount"


def _configured_mirror(suite: str) -> str:
    """Return the mirror that apt has for a suite; empty if none: debootstrap then uses its own."""
    lines: list[str] = []
    listing = ["apt-get", "indextargets", "--format", "$(RELEASE) $(CODENAME) $(SUITE) $(REPO_URI)"]
    with suppress(SandboxFailed):  # a machine without apt has none
        run_program(
            [*listing, "Created-By: Packages"],
            folder=Path("/"),
            environment=dict(os.environ),
            timeout_s=APT_LIMIT_S,
            heard=lines.append,
        )
    for line in lines:
        *names, mirror = line.split(" ")
        if suite in names:
            return mirror
    return ""


def _hidden(text: str, private: str) -> str:
    """Remove the mirror's address: it may hold a password, and errors and logs travel."""
    return re.sub(re.escape(private.rstrip("/")) + "/?", "(mirror)/", text) if private else text


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return " / ".join(line.strip() for line in lines[-6:])
