"""An image: a root filesystem in a folder or a SIF file, with the manifest that says what it was built from.

Who uses an image holds it (`hold`): a shared lock on the folder or file, which the kernel lets go of when the last
process that inherited it ends, however it ends. An image that was replaced or removed keeps its files until nobody
holds it, so a running sandbox never loses files below it. On other machines that share the folder nobody sees the lock
unless the file system carries it: do not build there what runs here.

Left out on purpose: any check of what is inside. An image without a shell is an image.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec

from ...errors import ConfigError, SandboxFailed

Format = Literal["directory", "sif"]
"""A root filesystem in a folder, which starts fastest; or one compressed file, which is moved most easily."""
Mode = Literal["scratch", "versioned", "lock"]
"""When an image that is there is used again (see `caching`)."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MANIFEST = "manifest.json"
HOLD_ATTEMPTS = 10
"""How often an image may be replaced under the hands of one who wants to hold it."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image is made from: two builds of the same recipe give the same image. Digests are of SHA-256."""

    source: str
    """As it was asked for, paths made absolute; without the mirror, whose address may hold a password."""
    format: Format
    definition: str = ""
    """Digest of the definition, its template filled in; empty without one."""
    base: str = ""
    """Identity of the base image: of a folder its tree's digest, of a file its digest, else its reference."""
    lock: str = ""
    """Digest of the dependency lock file; empty without one."""
    maker: str = "apptainer"
    """What puts it together: `apptainer`, or `copy` where Apptainer is not installed."""
    version: str = ""
    """Version of this package."""
    recipe_version: int = 1
    """Number of the way in which this package builds images."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written beside an image."""

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
    """Digest of a SIF file: its compression has no checksum, so that nothing else would notice damage."""


def default_root() -> Path:
    """Give where images are kept if nothing else is said: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path("~/.cache").expanduser()) / "prorl" / "images"


@dataclass(frozen=True)
class Image:
    """An image that is complete.

    Args:
        name: what it is called in its store.
        path: the folder or SIF file itself, behind any link; it stays until nobody holds it.
        manifest: what it was built from.
    """

    name: str
    path: Path
    manifest: Manifest


def check_name(name: str) -> str:
    """Give the name of an image.

    Raises:
        ConfigError: it is not one.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a name for an image: use 1 to 100 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit",
            key="name",
        )
    return name


def read_manifest(image: Path) -> Manifest:
    """Read what lies beside an image.

    Raises:
        OSError: nothing, so it is none of ours.
        msgspec.MsgspecError: it is malformed.
    """
    return msgspec.json.decode((image.parent / MANIFEST).read_bytes(), type=Manifest)


class Hold:
    """A lock on an image; close it when the image is no longer used.

    Args:
        path: the image itself, behind any link: start sandboxes from this path.
        descriptor: an open file whose lock this is; children that inherit it hold the image too.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def close(self) -> None:
        """Let go of the image; may be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hold(image: Path) -> Hold:
    """Keep an image's files from being removed, whatever is built or removed under its name from now on.

    Args:
        image: a name in a store (the link `ROOT/NAME`), or any folder or SIF file.

    Raises:
        SandboxFailed: there is none, or it may not be read.
    """
    for _ in range(HOLD_ATTEMPTS):
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
            return Hold(path, descriptor)
        os.close(descriptor)
    raise SandboxFailed(f"the image {image} is being removed or replaced all the time")


def hold_alone(path: Path) -> Hold | None:
    """Hold an image so that nobody else can from now on; None if somebody holds it.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if _locked(descriptor, fcntl.LOCK_EX):
        return Hold(path, descriptor)
    os.close(descriptor)
    return None


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A network file system that has no such locks on what is open for reading only: all images count as held there.
        return kind == fcntl.LOCK_SH
    return True


def _is_still_at(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
