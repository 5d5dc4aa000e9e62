"""`prorl image`."""

from __future__ import annotations

import signal
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from ..errors import ConfigError
from .options import Images, Verbose, Wait, named_texts
from .progress_display import Progress
from .tables import console, print_table, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..tools.images.image_store import ImageStore
    from ..tools.images.sources import Base

commands = typer.Typer(
    help="Build and keep the images that sandboxes start from. Try: "
    "prorl image build ./rootfs --name mine, then prorl image list.",
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The image, as `prorl image list` shows.")]
BaseImages = Annotated[
    list[str] | None,
    typer.Option(
        "--base",
        metavar="NAME=SOURCE",
        help="For an image that a Dockerfile or task names, such as ubuntu:24.04: an image of `prorl image list`, a "
        "folder, a SIF file, docker-archive:FILE, oci:FOLDER or docker://IMAGE. May be repeated. [default: docker://NAME]",
    ),
]


@commands.command()
def build(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Dockerfile, image.def, image.def.j2 (a template), a folder, image.sif, docker://IMAGE, "
            "docker-archive:FILE, oci:FOLDER, or debootstrap://SUITE?include=PACKAGE,…&variant=minbase (as root).",
        ),
    ],
    name: Annotated[str, typer.Option("--name", "-n", help="The image's name.")],
    mode: Annotated[
        Literal["scratch", "versioned", "lock"],
        typer.Option(
            help="When to use the existing image. scratch: never. versioned: while source, base image and our "
            "version are unchanged. lock: while source and lock file are."
        ),
    ] = "versioned",
    lock: Annotated[
        Path | None,
        typer.Option("--lock", metavar="FILE", help="Dependency lock file; templates have its path as lock_file."),
    ] = None,
    format_: Annotated[
        Literal["directory", "sif"],
        typer.Option("--format", help="A folder, which starts fastest, or one compressed file."),
    ] = "directory",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A variable of a template; may be repeated.")
    ] = None,
    base: BaseImages = None,
    mirror: Annotated[str, typer.Option(help="Package mirror for debootstrap. [default: that of apt]")] = "",
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="How long the build may take.")] = 3600.0,
    wait: Wait = 3600.0,
    images: Images = None,
    verbose: Verbose = False,
) -> None:
    """Build an image, or say why the existing one is up to date; print its path.

    Example: prorl image build python.def.j2 --set version=3.12 --name python --mode lock --lock requirements.txt
    """
    variables = named_texts("--set", settings)
    store = image_store(images)
    with ExitStack() as locks, build_progress("prorl image", verbose=verbose) as (say, heard):
        built = store.build(
            source,
            name,
            mode=mode,
            lock_file=lock,
            format=format_,
            variables=variables,
            bases=named_bases(base or (), None, store, locks),
            mirror=mirror,
            timeout_s=timeout,
            wait_s=wait,
            say=say,
            heard=heard,
        )
    print(store.root / built.image.name)


@commands.command("list")
def list_(images: Images = None) -> None:
    """List the images."""
    store = image_store(images)
    rows: list[tuple[object, ...]] = [
        (
            *(one.name, one.manifest.recipe.format, f"{one.manifest.size_bytes / 1e6:.1f}", one.manifest.mode),
            *(one.manifest.recipe.version, one.manifest.recipe.source),
        )
        for one in store.list()
    ]
    none = ("none", "", "", "", "", "build one with `prorl image build`")
    headers = ("image", "=format", ">MB", "=mode", "=built with", "from")
    print_table(*headers, rows=rows or [none], title=f"images in {store.root}")


@commands.command()
def show(name: Name, images: Images = None) -> None:
    """Print an image's path and what it was built from, as JSON."""
    store = image_store(images)
    image = store.show(name)
    content = {"path": str(store.root / name), "files": str(image.path), **msgspec.to_builtins(image.manifest)}
    print(msgspec.json.format(msgspec.json.encode(content)).decode())


@commands.command()
def remove(name: Name, wait: Wait = 3600.0, images: Images = None) -> None:
    """Remove an image. Sandboxes that use it keep its files until they end."""
    with build_progress("prorl image", verbose=False) as (say, _):
        if not image_store(images).remove(name, wait_s=wait, say=say):
            say(f"a sandbox still uses the files of {name}; the next build or removal of that name removes them")


@commands.command()
def stage(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files or folders.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="A private folder on this host's own disk.")],
) -> None:
    """Copy images from a shared file system to this host's disk, unless a copy is there; print where they are.

    Several allocations on one host share one copy. A copy is complete or missing.
    """
    from ..tools.images.staging import stage_image

    for image in images:
        with build_progress("prorl image", verbose=False) as (say, _):
            copy = stage_image(image, to.absolute(), say)
        print(copy)


def image_store(root: Path | None) -> ImageStore:
    """Return the store of images in a folder; None: the default one."""
    from ..tools.images.image import default_root
    from ..tools.images.image_store import ImageStore

    return ImageStore(default_root() if root is None else root)


def named_bases(given: Sequence[str], file: Path | None, store: ImageStore, locks: ExitStack) -> dict[str, Base]:
    """Return base images by the names that Dockerfiles have for them, of a TOML file and then of options.

    Images of the store are locked until `locks` closes.
    """
    from ..system.settings_file import read_toml
    from ..tools.images.image import NAME_PATTERN, lock_image
    from ..tools.images.sources import parse_base

    texts: dict[str, str] = {}
    for name, value in (read_toml(file) if file is not None else {}).items():
        if not isinstance(value, str):
            raise ConfigError(f"{file}: {name} is not a text, but names a base image", key="bases")
        texts[name] = value
    for option in given:
        name, equals, value = option.partition("=")
        if not name or not equals or not value:
            raise ConfigError(f"--base {option}: write NAME=SOURCE, such as ubuntu:24.04=ubuntu", key="base")
        texts[name] = value
    found = {}
    for name, value in texts.items():
        image = store.find(value) if NAME_PATTERN.fullmatch(value) else None
        found[name] = parse_base(str(locks.enter_context(lock_image(image.path)).path) if image is not None else value)
    return found


@contextmanager
def build_progress(program: str, *, verbose: bool) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Yield two functions: one for our own lines, and one for those of the building programs.

    SIGTERM ends the command as ^C does, which removes temporary files and ends programs.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    screen = console(stderr=True)

    def show(line: str) -> None:
        screen.print(text(line))

    with Progress(program) as work:
        yield show, (show if verbose else work.update)
