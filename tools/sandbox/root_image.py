"""The root filesystem that a sandbox names: a path, or the name of an image that `prorl image build` made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from ..images.image import default_root

if TYPE_CHECKING:
    from ...messages import SandboxKind

SIF_MAGIC = b"SIF_MAGIC"
SIF_MAGIC_AT = 32
"""Where a SIF file says what it is, behind the line that runs it."""


def find_image(image: str) -> Path:
    """Give the path of an image that is named by its path, or as `prorl image list` names it.

    Raises:
        SandboxFailed: there is none (`reason` is `image`).
    """
    if "://" in image:
        raise SandboxFailed(
            f"{image} is no image on this machine; make one of it: prorl image build {image} --name NAME",
            reason="image",
        )
    path = Path(image).expanduser()
    if "/" not in image and not path.exists():
        path = default_root() / image
    if not path.exists():
        where = f", nor one of that name in {path.parent}" if "/" not in image else ""
        raise SandboxFailed(f"there is no image {image}{where}; build it with: prorl image build", reason="image")
    return path.absolute()


def check_image(kind: SandboxKind, image: Path) -> None:
    """See whether a kind can start from an image.

    Raises:
        SandboxFailed: it cannot (`reason` is `image`).
    """
    if kind == "process":
        return
    if image.is_dir():
        if not (image / "bin").exists():
            raise SandboxFailed(f"the image {image} has no /bin; it is not a root filesystem", reason="image")
        return
    if kind == "bubblewrap":
        raise SandboxFailed(
            f"the image {image} is a file; bubblewrap takes directories only (use apptainer)", reason="image"
        )
    try:
        with image.open("rb") as file:
            magic = file.read(SIF_MAGIC_AT + len(SIF_MAGIC))[SIF_MAGIC_AT:]
    except OSError as error:
        raise SandboxFailed(f"the image {image} cannot be read: {error.strerror}", reason="image") from error
    if magic != SIF_MAGIC:
        raise SandboxFailed(f"the image {image} is neither a directory nor a SIF file", reason="image")
