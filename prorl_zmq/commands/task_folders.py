"""`prorl tasks validate` and `prorl tasks images` of folders of Harbor tasks."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import typer

from ..errors import InvalidRecord, ProrlError
from ..system.logs import one_line
from .images import build_progress, named_bases
from .tables import print_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ..tasks.harbor_folder import TaskFolder, TaskImage
    from ..tools.images.image_store import ImageStore
    from ..tools.images.sources import Base

SHOWN_FOLDERS = 200
"""Folders in the table, unless all are requested; the wrong ones come first then."""


def validate_folders(root: Path, *, every: bool) -> None:
    """Print each task folder, and what is wrong with it; exit with 1 if anything is."""
    rows = [
        (name, read.message if isinstance(read, InvalidRecord) else _can_run(read)) for name, read in _folders(root)
    ]
    wrong = sum(not verdict.startswith("ok") for _, verdict in rows)
    shown = rows
    if len(rows) > SHOWN_FOLDERS and not every:
        shown = sorted(rows, key=lambda row: row[1].startswith("ok"))[:SHOWN_FOLDERS]
    lines = [(one_line(name), one_line(problem)) for name, problem in shown]
    print_table("folder", "can it run", rows=lines, title=f"Harbor tasks of {one_line(str(root))}")
    if len(shown) < len(rows):
        print(f"… and {len(rows) - len(shown)} more folders: --all shows them")
    print(f"{len(rows) - wrong} of {len(rows)} task folders can run")
    if wrong:
        raise typer.Exit(1)


def _can_run(folder: TaskFolder) -> str:
    urls = [server.url for server in folder.task.mcp if server.url]
    return f"ok, if the service has {', '.join(urls)} in [[mcp]]" if urls else "ok"


def images_of_folders(
    root: Path, store: ImageStore, *, build: bool, dockerfiles: bool, base: Sequence[str], bases: Path | None
) -> None:
    """Print the images that task folders need, and build missing ones; exit with 1 if any is missing at the end."""
    needed: dict[str, TaskImage] = {}
    users: Counter[str] = Counter()
    wrong = 0
    for _, read in _folders(root):
        wrong += isinstance(read, InvalidRecord)
        for image in () if isinstance(read, InvalidRecord) else read.images:
            needed.setdefault(image.name, image)
            users[image.name] += 1
    if wrong:
        print(f"{wrong} folders are wrong, and their images are left out: prorl tasks validate {root}")
    missing, rows = 0, []
    with ExitStack() as locks:
        known = named_bases(base, bases, store, locks)
        for name, image in sorted(needed.items()):
            source = _source(image, known, dockerfiles=dockerfiles)
            state = "there" if any(store.find(each) is not None for each in (name, f"{name}.sif")) else "missing"
            if state == "missing" and build:
                state = _build(store, image, source, known)
            missing += state.startswith("missing")
            rows.append((name, state, users[name], source))
    print_table("image", "state", ">tasks", "source", rows=rows, title=f"images of {one_line(str(root))}")
    if missing and not build:
        print(f"{missing} of {len(rows)} images are missing: --build builds them")
    if missing or wrong:
        raise typer.Exit(1)


def _folders(root: Path) -> Iterator[tuple[str, TaskFolder | InvalidRecord]]:
    """Yield each task folder by its path below the root, as it is read, or what is wrong with it."""
    from ..tasks.harbor_folder import find_task_folders, read_task_folder

    for folder in find_task_folders(root):
        name = root.resolve().name if folder == root else folder.relative_to(root).as_posix()
        try:
            yield name, read_task_folder(folder)
        except InvalidRecord as error:
            yield name, error


def _source(image: TaskImage, bases: Mapping[str, Base], *, dockerfiles: bool) -> str:
    """Return what an image is built from, as `prorl image build` takes it."""
    from ..tools.images.sources import base_of

    if image.dockerfile is not None and (dockerfiles or not image.reference):
        return str(image.dockerfile)
    return str(base_of(image.reference, bases))


def _build(store: ImageStore, image: TaskImage, source: str, bases: Mapping[str, Base]) -> str:
    """Build an image; return the state it is in then."""
    with build_progress("prorl tasks images", verbose=False) as (say, heard):
        say(f"building {image.name} from {source}")
        try:
            store.build(source, image.name, bases=bases, timeout_s=image.build_s, heard=heard)
        except ProrlError as error:
            return f"missing: {one_line(error.message)}"
    return "built"
