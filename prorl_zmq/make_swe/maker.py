"""Makes the instances of projects: fetch, image, baseline, search, verification; several sandboxes at a time.

The number of sandboxes changes how long it takes, not what comes out. Mutations are searched for in one sandbox per
project; those that were found are verified side by side, and the search continues for those that did not hold.

    OUT.parts/LABEL-DIGEST.json     the result of one project; an interrupted run continues from these
    OUT                             all instances; written in one step at the end
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import ConfigError, ProrlError, SandboxFailed
from ..tools.containers.specification import SandboxSpec
from ..tools.images.fingerprint import digest
from ..tools.sandbox.sandboxes import Sandboxes
from .project import fetch
from .project_image import ask_base, build_image, find_base
from .search import Made, make_instances, side_by_side

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ..tools.images.image import Image
    from ..tools.images.image_store import ImageStore
    from ..tools.sandbox.sandbox import Sandbox
    from .project import Project
    from .project_image import Base
    from .recipe import Order, Settings

MAKER_VERSION = 1
"""Raise it when the same order comes to other instances."""
DEFAULT_REQUIREMENTS = ("pytest",)


class Maker:
    def __init__(
        self, store: ImageStore, settings: Settings, say: Callable[[str], None], heard: Callable[[str], None]
    ) -> None:
        self._store = store
        self._settings = settings
        self._say = say
        self._heard = heard
        self._slots = asyncio.Semaphore(settings.jobs)
        self._numbers = count(1)
        self._base: Base | None = None
        self._alone = False
        """The only project's failure is reported by the caller."""

    async def make(self, orders: Sequence[Order], parts: Path) -> list[Made | ProrlError]:
        """Return the result of each project, or its error."""
        work = Path(tempfile.mkdtemp(prefix="prorl-make-swe-"))
        sandboxes = Sandboxes("apptainer", work / "sandboxes")
        try:
            await asyncio.to_thread(sandboxes.check)
            image = await asyncio.to_thread(find_base, self._store, self._settings.base, self._say, self._heard)
            self._base = await ask_base(image, sandboxes)
            await asyncio.to_thread(_make_folder, parts)
            self._alone = len(orders) == 1
            return await side_by_side(
                [self._guarded(order, work / str(number), parts, sandboxes) for number, order in enumerate(orders)]
            )
        finally:
            sandboxes.close()
            await asyncio.to_thread(_remove, work, parts)

    async def _guarded(self, order: Order, work: Path, parts: Path, sandboxes: Sandboxes) -> Made | ProrlError:
        try:
            return await self._make(order, work, parts, sandboxes)
        except OSError as error:
            failed: ProrlError = SandboxFailed(f"{order.source}: {error.strerror} ({error.filename})")
        except ProrlError as error:
            failed = error
        if not self._alone:
            self._say(f"{order.source}: {failed.message}")
        return failed

    async def _make(self, order: Order, work: Path, parts: Path, sandboxes: Sandboxes) -> Made:
        assert self._base is not None
        async with self._slots:
            started = time.monotonic()
            project, image = await asyncio.to_thread(self._prepare, order, work, self._base)
            busy_s = time.monotonic() - started
        part = parts / f"{project.label}-{self._identity(order, image)}.json"
        with suppress(OSError, msgspec.MsgspecError):
            before = msgspec.json.decode(part.read_bytes(), type=Made)
            self._say(f"{project.label} was made before: {part}")
            return before
        spec = SandboxSpec(image=str(image.path), writable="disk", fakeroot=True)

        @asynccontextmanager
        async def opened() -> AsyncIterator[Sandbox]:
            nonlocal busy_s
            async with self._slots:
                started = time.monotonic()
                sandbox = await sandboxes.create(f"s{next(self._numbers)}", spec)
                try:
                    yield sandbox
                finally:
                    await sandbox.close()
                    busy_s += time.monotonic() - started

        made = await make_instances(project, image, order, self._settings, opened, self._say)
        made = msgspec.structs.replace(made, busy_s=round(busy_s, 1))
        await asyncio.to_thread(write_atomically, part, msgspec.json.encode(made))
        self._say(f"{made.label}: {len(made.instances)} instances in {made.busy_s:.0f} s of work")
        return made

    def _prepare(self, order: Order, work: Path, base: Base) -> tuple[Project, Image]:
        work.mkdir()
        project = fetch(order.source, work, sha256=order.sha256, path=order.path)
        metadata = project.metadata
        if order.permissive_only and not metadata.permissive:
            license_ = metadata.license or "no license"
            raise ConfigError(f"{project.label} has {license_!r}; sets may have permissive licenses only", key="recipe")
        requirements = order.requirements
        if requirements is None:
            requirements = (*DEFAULT_REQUIREMENTS, *metadata.requirements_for(base.python))
        requirements = tuple(dict.fromkeys((*requirements, *order.more_requirements)))
        self._say(f"{project.label}: needs {', '.join(requirements) or 'nothing'}")
        image = build_image(self._store, base, project, requirements, work, say=self._say, heard=self._heard)
        return project, image

    def _identity(self, order: Order, image: Image) -> str:
        """Return a digest of all inputs; the image's name contains that of the project and its base."""
        settings = self._settings
        parts = (image.name, order.instances, order.tests, order.options, settings.seed, settings.most_failing)
        return digest(repr((*parts, MAKER_VERSION)).encode())[:10]


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}", key="out") from error


def _remove(work: Path, parts: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    with suppress(OSError):
        parts.rmdir()  # if nothing was made


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically and durably."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
