"""An image: a root filesystem in a folder or a SIF file, with the manifest that says what it was built from.

An existing image is reused by one of three modes, after the ProRL Agent paper: `scratch` always builds; `versioned`
reuses while the base image and the version of this package are unchanged; `lock` while the dependency lock file is
unchanged. In each mode another source, format or definition (its template rendered) is another image.

A sandbox locks its image (`lock_image`): a shared lock on the folder or file, which the kernel frees when the last
process that inherited it ends. A locked image keeps its files when it is replaced or removed. Other machines that share
the folder do not see the lock unless the file system carries it: do not build there what runs here.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

import msgspec

from ...errors import ConfigError, SandboxFailed

Format = Literal["directory", "sif"]
"""A root filesystem in a folder, which starts fastest; or one compressed file, which is easiest to move."""
Mode = Literal["scratch", "versioned", "lock"]
"""When an existing image is reused (see above)."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MANIFEST = "manifest.json"
LOCK_ATTEMPTS = 10
"""How often an image may be replaced while it is being locked."""
SIF_MAGIC = b"SIF_MAGIC"
SIF_MAGIC_OFFSET_BYTES = 32
"""Where a SIF file has its type, after the line that runs it."""
APPTAINER_PROGRAMS = ("apptainer", "singularity")
VERSIONED: tuple[Mode, ...] = ("versioned",)
BOTH: tuple[Mode, ...] = ("versioned", "lock")
CHANGES: dict[str, tuple[str, tuple[Mode, ...]]] = {
    "source": ("the source is another ({old} → {new})", BOTH),
    "format": ("the format is another ({old} → {new})", BOTH),
    "definition": ("the definition changed", BOTH),
    "base": ("the base image changed", VERSIONED),
    "version": ("the version of prorl-zmq changed ({old} → {new})", VERSIONED),
    "recipe_version": ("the way in which prorl-zmq builds images changed ({old} → {new})", VERSIONED),
    "maker": ("it was put together by another program ({old} → {new})", VERSIONED),
    "lock": ("the lock file changed", ("lock",)),
}
"""By field of a recipe: what a change of it is called, and the modes that build again then."""
UNCHANGED: dict[Mode, str] = {
    "scratch": "",
    "versioned": "source, base image and version are unchanged",
    "lock": "source and lock file are unchanged",
}


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image is made from: two builds of the same recipe give the same image. Digests are of SHA-256."""

    source: str
    """As it was requested, paths made absolute; without the mirror, whose address may hold a password."""
    format: Format
    definition: str = ""
    """Digest of the definition, its template rendered; empty without one."""
    base: str = ""
    """Identity of the base image: of a folder its tree's digest, of a file its digest, else its reference."""
    lock: str = ""
    """Digest of the dependency lock file; empty without one."""
    maker: str = "apptainer"
    """What puts it together: `apptainer`, or `copy` where Apptainer is not installed."""
    version: str = ""
    recipe_version: int = 1


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    mode: Mode
    recipe: Recipe
    reason: str
    """Why it was built."""
    built_at_s: float
    """Seconds since 1970."""
    took_s: float
    size_bytes: int
    """What its files hold; the disk may need more or less."""
    sif_digest: str = ""
    """Digest of a SIF file: its compression has no checksum, so nothing else would reveal damage."""


def default_root() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path("~/.cache").expanduser()) / "prorl" / "images"


@dataclass(frozen=True)
class Image:
    name: str
    path: Path
    """The folder or SIF file itself, behind any link; it stays while it is locked."""
    manifest: Manifest


def check_name(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a name for an image: use 1 to 100 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit",
            key="name",
        )
    return name


def read_manifest(image: Path) -> Manifest:
    """Read the manifest in an image's folder; an OSError means that this package did not build the image."""
    return msgspec.json.decode((image.parent / MANIFEST).read_bytes(), type=Manifest)


class Verdict(NamedTuple):
    reuse: bool
    reason: str


def decide(mode: Mode, wanted: Recipe, there: Manifest | None, *, waited: bool = False) -> Verdict:
    """Decide whether the existing image is reused.

    `waited`: another process built it while this one waited for it. Then it is reused in mode `scratch` too, if the
    whole recipe is the same: both asked for it at the same time.
    """
    if there is None:
        return Verdict(reuse=False, reason="there is no image of this name yet")
    if waited and wanted == there.recipe:
        return Verdict(reuse=True, reason="another process built it just now")
    if mode == "scratch":
        return Verdict(reuse=False, reason="mode scratch always builds")
    if changed := _changes(mode, wanted, there.recipe):
        return Verdict(reuse=False, reason="; ".join(changed))
    return Verdict(reuse=True, reason=UNCHANGED[mode])


def _changes(mode: Mode, wanted: Recipe, there: Recipe) -> list[str]:
    found = []
    for field, (words, modes) in CHANGES.items():
        new, old = getattr(wanted, field), getattr(there, field)
        if mode in modes and new != old:
            missing = field == "lock" and not old
            found.append("it was built without a lock file" if missing else words.format(old=old, new=new))
    return found


class ImageLock:
    """Keeps an image's files until it is closed; children that inherit the descriptor keep them too."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        """The image itself, behind any link: start sandboxes from this path."""
        self.descriptor = descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_sif(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(SIF_MAGIC_OFFSET_BYTES + len(SIF_MAGIC))[SIF_MAGIC_OFFSET_BYTES:] == SIF_MAGIC


def apptainer_program() -> str | None:
    return next(filter(None, map(shutil.which, APPTAINER_PROGRAMS)), None)


def lock_image(image: Path) -> ImageLock:
    for _ in range(LOCK_ATTEMPTS):
        try:
            path = image.resolve(strict=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if image.exists():
                continue  # replaced since it was resolved
            raise SandboxFailed(f"there is no image {image}; build it with: prorl image build") from None
        except OSError as error:
            raise SandboxFailed(f"the image {image} cannot be opened: {error.strerror}") from error
        if _locked(descriptor, fcntl.LOCK_SH) and _is_still_at(path, descriptor):
            return ImageLock(path, descriptor)
        os.close(descriptor)
    raise SandboxFailed(f"the image {image} is being removed or replaced all the time")


def lock_alone(path: Path) -> ImageLock | None:
    """Lock an image so that no other process can from now on; None if one has locked it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if _locked(descriptor, fcntl.LOCK_EX):
        return ImageLock(path, descriptor)
    os.close(descriptor)
    return None


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A network file system without such locks on what is open for reading only: all images count as locked there.
        return kind == fcntl.LOCK_SH
    return True


def _is_still_at(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
