"""The root filesystem that a sandbox names: a path, or the name of an image that `prorl image build` made.

The operator of the service may name any (`find_image`). A job comes from a trainer, which must see nothing of the host,
and an image is shown whole: so a job may name only offered images (`find_offered`). Neither may be the host's own root,
or have the service's private folders below it.

A wrong name or image is the task's fault (`reason` is `image`). An image that is missing or unreadable on this machine
is the infrastructure's, and the job is retried.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from ...errors import ConfigError, SandboxFailed
from ..images.image import NAME_PATTERN, default_root, is_sif

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .container import ImageFormat

SHOWN_LENGTH = 200
"""How much of a job's words an error repeats."""


def find_image(image: str) -> Path:
    """Return the path of an image that the operator names: by its path, or its name in `prorl image list`."""
    _refuse_reference(image)
    try:
        path = Path(image).expanduser()
        if "/" not in image and not path.exists():
            path = default_root() / image
        if not path.exists():
            where = f", nor one of that name in {path.parent}" if "/" not in image else ""
            raise SandboxFailed(
                f"there is no image {image}{where}; build it with: prorl image build", reason="no_image"
            )
    except (OSError, ValueError, RuntimeError) as error:  # such as `~` of a user that there is not
        raise SandboxFailed(f"the image {_shown(image)} cannot be found: {error}", reason="image") from error
    return path.absolute()


def find_offered(image: str, folders: Iterable[Path]) -> Path:
    """Return the path of an image that a job names: one that `prorl image build` made, or one below a folder.

    The name must begin with one of the folders, and lead to one. The path has no link that a sandbox could have
    written, and change afterwards: only the link `FOLDER/NAME` stays, which `lock_image` follows.

    Raises:
        SandboxFailed: it is not offered (`reason` is `image`), or not on this machine (`no_image`).
    """
    _refuse_reference(image)
    offered = {folder.absolute(): folder.resolve() for folder in (default_root(), *folders)}
    looked_at = [path for named, folder in offered.items() if (path := _below(image, named, folder)) is not None]
    for path in looked_at:
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: of links in a circle, before Python 3.13
            continue
        if any(real != each and real.is_relative_to(each) for each in offered.values()):
            return path if path.parent in offered.values() else real
    # Deeper, links lead to the host's files, and a caller must not learn which of these exist.
    if looked_at and all(path.parent in offered.values() and not os.path.lexists(path) for path in looked_at):
        raise SandboxFailed(
            f"there is no image {_shown(image)} on this machine; build it here too (`prorl image build`), or copy it "
            "from where it is (`prorl image stage`)",
            reason="no_image",
        )
    raise SandboxFailed(
        f"no image {_shown(image)} is offered to jobs; build it with `prorl image build`, and name it as "
        "`prorl image list` does, or have its folder added to `image_folders` in [sandbox] of the topology file",
        reason="image",
    )


def check_folder(folder: Path, private: Iterable[Path]) -> Path:
    """Return the absolute path of a folder of images for jobs."""
    try:
        path = folder.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"the image folder {folder}: {error}", key="sandbox.image_folders") from error
    if not path.is_absolute():
        raise ConfigError(f"the image folder {folder} is not an absolute path", key="sandbox.image_folders")
    if problem := _exposes(path, private):
        message = f"{folder} cannot be a folder of images for jobs: {problem}; name a folder that has only images"
        raise ConfigError(message, key="sandbox.image_folders")
    return path


def check_private(image: Path, private: Iterable[Path]) -> None:
    """Refuse an image that would show sandboxes private files of the host, also where the operator named it."""
    if problem := _exposes(image, private):
        message = f"{image} cannot be an image: {problem}; build one with: prorl image build"
        raise SandboxFailed(message, reason="image")


def check_image(kind: str, formats: Collection[ImageFormat], image: Path) -> None:
    """Check that a kind of sandbox that takes images of these formats can start from an image."""
    if not formats:
        return
    if image.is_dir():
        check_private(image, ())
        if not (image / "bin").exists():
            raise SandboxFailed(f"the image {image} has no /bin; it is not a root filesystem", reason="image")
        return
    if "sif" not in formats:
        message = f"the image {image} is a file; {kind} takes directories only (use apptainer)"
        raise SandboxFailed(message, reason="image")
    try:
        known = is_sif(image)
    except OSError as error:
        raise SandboxFailed(f"the image {image} cannot be read: {error.strerror}") from error
    if not known:
        raise SandboxFailed(f"the image {image} is neither a directory nor a SIF file", reason="image")


def _exposes(path: Path, private: Iterable[Path]) -> str:
    """Return what of the host's a folder has below it; empty if nothing."""
    real = path.resolve()
    with suppress(OSError):
        if os.path.samestat(real.stat(), os.stat("/")):  # noqa: PTH116
            return "it is the host's own root"
    for each in private:
        if each.resolve().is_relative_to(real):
            return f"the host's {each} is part of it"
    return ""


def _below(image: str, named: Path, folder: Path) -> Path | None:
    """Return where in a folder an image with this name or path is; None if it is not in there."""
    if "/" not in image:
        return folder / image if NAME_PATTERN.fullmatch(image) else None
    path = PurePath(image)
    if ".." in path.parts or "\0" in image:
        return None
    for prefix in (named, folder):
        if path != prefix and path.is_relative_to(prefix):
            return folder / path.relative_to(prefix)
    return None


def _refuse_reference(image: str) -> None:
    if "://" in image:
        shown = _shown(image)
        raise SandboxFailed(
            f"{shown} is not an image on this machine; make one of it: prorl image build {shown} --name NAME",
            reason="image",
        )


def _shown(image: str) -> str:
    return image if len(image) <= SHOWN_LENGTH else f"{image[:SHOWN_LENGTH]}…"
