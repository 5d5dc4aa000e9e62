"""A folder of images: built, found, listed, shown, removed.

    ROOT/NAME                             link to the image; replaced atomically, so it is always absent or complete
    ROOT/.NAME/                           its versions (see `kept_folder`)
    ROOT/.NAME/ID/rootfs or image.sif     the image
    ROOT/.NAME/ID/manifest.json           what it was built from
    ROOT/.NAME/ID/image.def               the definition, its template rendered, if there was one

An image that is replaced or removed loses its name at once. Its files are removed when no sandbox has locked it
(`image.lock_image`): now, or at the next build or removal of that name. A builder may be killed at any moment: what it
started ends with it, the name keeps its old image or none, and the next build of the name removes the rest.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...errors import ConfigError, SandboxFailed
from .builder import RECIPE_VERSION, Builder, check_possible, ignore_line
from .definition import Definition
from .fingerprint import digest, file_digest, size_bytes
from .image import MANIFEST, Format, Image, Manifest, Mode, Recipe, check_name, decide, read_manifest
from .kept_folder import BUILDING, locked
from .sources import DockerfileSource, Source, parse_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from .kept_folder import KeptFolder
    from .sources import Base

BUILD_LIMIT_S = 3600.0
WAIT_LIMIT_S = 3600.0


class Built(NamedTuple):
    image: Image
    reused: bool
    """Nothing was built: the existing image is used."""
    reason: str
    """Why it was built or reused."""


class ImageStore:
    """A folder of images, made with the first one, for its owner alone; any number of processes may use it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def build(
        self,
        source: str,
        name: str,
        *,
        mode: Mode = "versioned",
        lock_file: Path | None = None,
        format: Format = "directory",  # noqa: A002 - what it is called everywhere else
        variables: Mapping[str, str] | None = None,
        mirror: str = "",
        bases: Mapping[str, Base] | None = None,
        timeout_s: float = BUILD_LIMIT_S,
        wait_s: float = WAIT_LIMIT_S,
        say: Callable[[str], None] = ignore_line,
        heard: Callable[[str], None] = ignore_line,
    ) -> Built:
        """Build an image, or reuse the one of that name (see `image` for `mode`).

        `variables` are for a template, `mirror` is for debootstrap, `lock_file` for mode `lock`, `bases` what a
        Dockerfile gets for the published images that it names. `timeout_s` limits the
        build, `wait_s` the wait for another process that builds the same name. `say` is called with lines for a person,
        `heard` with each line that the building programs print.

        Raises:
            ConfigError: an argument is wrong (`key`).
            SandboxUnavailable: this machine cannot build it (`kind`).
            SandboxFailed: the build failed, or the disk refused it.
        """
        check_name(name)
        if (mode == "lock") != (lock_file is not None):
            raise ConfigError("mode lock and a lock file go together: --mode lock --lock FILE", key="lock")
        parsed = parse_source(source, variables=variables, lock_file=lock_file, mirror=mirror, bases=bases)
        recipe = make_recipe(parsed, format, lock_file)
        seen = self.find(name)
        with self._explained(name):
            self.root.mkdir(0o700, parents=True, exist_ok=True)
            with locked(self._folder(name), wait_s=wait_s, say=say) as folder:
                there = self.find(name)
                waited = there is not None and (seen is None or there.path != seen.path)
                verdict = decide(mode, recipe, there.manifest if there else None, waited=waited)
                if there is not None and verdict.reuse:
                    say(f"using {name} again: {verdict.reason}")
                    return Built(there, reused=True, reason=verdict.reason)
                say(f"building {name}: {verdict.reason}")
                self._clear(name, folder)
                started = time.monotonic()
                with folder.building() as build:
                    built = Builder(build, folder.descriptor, timeout_s, heard).build(parsed, format)
                    manifest = Manifest(
                        name=name,
                        mode=mode,
                        recipe=recipe,
                        reason=verdict.reason,
                        built_at_s=time.time(),
                        took_s=round(time.monotonic() - started, 3),
                        size_bytes=size_bytes(built),
                        sif_digest=file_digest(built) if format == "sif" else "",
                    )
                    (build / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
                    complete = folder.path / build.name.removeprefix(BUILDING)
                    build.rename(complete)
                folder.publish(self.root / name, complete / built.name)
                self._clear(name, folder)
                return Built(Image(name, complete / built.name, manifest), reused=False, reason=verdict.reason)

    def find(self, name: str) -> Image | None:
        """Return the image of a name; None if it is missing or incomplete."""
        link = self.root / check_name(name)
        with suppress(OSError, msgspec.MsgspecError):
            path = link.resolve(strict=True)
            return Image(name, path, read_manifest(path))
        return None

    def show(self, name: str) -> Image:
        image = self.find(name)
        if image is None:
            raise ConfigError(f"there is no image {name} in {self.root}; see: prorl image list", key="name")
        return image

    def list(self) -> list[Image]:
        with self._explained("images"):
            if not self.root.exists():
                return []
            names = sorted(each.name for each in self.root.iterdir() if each.is_symlink() and each.name[0] != ".")
        return [image for name in names if (image := self.find(name))]

    def remove(self, name: str, *, wait_s: float = WAIT_LIMIT_S, say: Callable[[str], None] = ignore_line) -> bool:
        """Remove an image; return False if a sandbox still uses its files.

        Then a later build or removal of the name removes them. Wait at most `wait_s` for a process that builds it.
        """
        link = self.root / check_name(name)
        with self._explained(name):
            if not link.is_symlink() and not self._folder(name).is_dir():
                raise ConfigError(f"there is no image {name} in {self.root}; see: prorl image list", key="name")
            with locked(self._folder(name), wait_s=wait_s, say=say) as folder:
                link.unlink(missing_ok=True)
                all_gone = self._clear(name, folder)
                folder.remove_if_empty()
                return all_gone

    def _folder(self, name: str) -> Path:
        return self.root / f".{name}"

    def _clear(self, name: str, folder: KeptFolder) -> bool:
        """Remove leftovers, and unlocked images without the name; return whether none is left."""
        current = None
        with suppress(OSError):
            current = (self.root / name).resolve(strict=True).parent
        return folder.remove_unused(current)

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise SandboxFailed(f"{name} in {self.root}: {error.strerror or error}{where}") from error


def make_recipe(source: Source, format_: Format, lock_file: Path | None) -> Recipe:
    maker = check_possible(source, format_)
    try:
        base = source.base()
        lock = file_digest(lock_file) if lock_file is not None else ""
    except OSError as error:
        raise ConfigError(f"{error.filename or source}: {error.strerror}", key="source") from error
    return Recipe(
        source=str(source),
        format=format_,
        definition=digest(source.text.encode()) if isinstance(source, Definition | DockerfileSource) else "",
        base=base,
        lock=lock,
        maker=maker,
        version=version("prorl-zmq"),
        recipe_version=RECIPE_VERSION,
    )
