"""Builds a project's image: the base image with the repository and the dependencies of its tests.

    /testbed                          the repository, clean
    SITE/PACKAGE                      the test dependencies, installed by pip of this machine for the image's Python
    SITE/prorl-testbed.pth            imports the project from /testbed
    SITE/NAME-VERSION.dist-info       its metadata, for `importlib.metadata`

The image's name ends in a digest of its inputs, so an instance names exactly the image that it was verified in. The
image must hold the project's source only once, or an agent could read the answer: dependencies and base images with a
copy of it are rejected.

The base image has Python 3.9 or newer and git: an image of the store, or a source for `prorl image build`.
"""

from __future__ import annotations

import compileall
import filecmp
import os
import re
import shutil
import stat
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from packaging.utils import canonicalize_name

from ..errors import ConfigError, SandboxFailed
from ..tools.containers.specification import SandboxSpec
from ..tools.images.fingerprint import NOT_PART, digest
from ..tools.images.image import lock_image
from .project import FILE_TIME_S, pip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..tools.images.image import Image
    from ..tools.images.image_store import ImageStore
    from ..tools.sandbox.sandboxes import Sandboxes
    from .project import Project

TESTBED = "/testbed"
LAYOUT = 1
"""Raise it when the build of images changes."""
MODULE_BYTES = 400
"""Smaller files may equal others by chance, such as an empty `__init__.py`."""
DEFAULT_BASE = "python-git"
DEBOOTSTRAP = "debootstrap://bookworm?include=git,python3&variant=minbase"
DEFINITION = """Bootstrap: docker
From: python:3.12-slim

%post
    apt-get update
    apt-get install --yes --no-install-recommends git
    rm -rf /var/lib/apt/lists/*
    pip uninstall --yes setuptools wheel || true
"""
"""For machines without debootstrap, from a registry."""
OLDEST = (3, 9)
ASK_LIMIT_S = 30.0
QUESTION = (
    "import json, shutil, site, sys; "
    "print(json.dumps({'version': list(sys.version_info[:2]), 'site': site.getsitepackages()[0], "
    "'git': shutil.which('git') is not None}))"
)


class _Answer(msgspec.Struct, frozen=True):
    version: tuple[int, int]
    site: str
    git: bool


class Base(msgspec.Struct, frozen=True):
    image: Path
    identity: str
    """Digest of its inputs."""
    python: str
    site: str
    """Its Python's site folder, such as `/usr/local/lib/python3.11/dist-packages`."""


def find_base(store: ImageStore, base: str, say: Callable[[str], None], heard: Callable[[str], None]) -> Image:
    """Return the base image, which is built if missing. Blocks for up to minutes."""
    if base and _is_source(base):
        return store.build(base, f"swe-base-{digest(base.encode())[:8]}", say=say, heard=heard).image
    if base or store.find(DEFAULT_BASE) is not None:
        return store.show(base or DEFAULT_BASE)
    if os.geteuid() == 0 and shutil.which("debootstrap") is not None:
        return store.build(DEBOOTSTRAP, DEFAULT_BASE, say=say, heard=heard).image
    with tempfile.TemporaryDirectory(prefix="prorl-base-") as folder:
        definition = Path(folder) / "python-git.def"
        definition.write_text(DEFINITION)
        return store.build(str(definition), DEFAULT_BASE, say=say, heard=heard).image


async def ask_base(image: Image, sandboxes: Sandboxes) -> Base:
    sandbox = await sandboxes.create("base", SandboxSpec(image=str(image.path)))
    try:
        result = await sandbox.exec(["python3", "-I", "-B", "-c", QUESTION], ASK_LIMIT_S)
    finally:
        await sandbox.close()
    try:
        answer = msgspec.json.decode(result.stdout, type=_Answer)
    except msgspec.MsgspecError:
        words = result.stderr.decode(errors="replace").strip()[-200:]
        raise ConfigError(f"the base image {image.name} has no python3 that runs: {words}", key="base") from None
    if answer.version < OLDEST:
        raise ConfigError(
            f"the base image {image.name} has Python {_dotted(answer.version)}; 3.9 is needed", key="base"
        )
    if not answer.git:
        raise ConfigError(f"the base image {image.name} has no git; add it to what is installed in it", key="base")
    if not image.path.is_dir():
        raise SandboxFailed(f"the base image {image.name} is a SIF file; build it with --format directory")
    recipe = image.manifest.recipe
    identity = digest(repr((recipe.source, recipe.definition, recipe.base, recipe.lock)).encode())
    return Base(image.path, identity, _dotted(answer.version), answer.site)


def _is_source(base: str) -> bool:
    return "://" in base or "/" in base or base.endswith((".def", ".def.j2", ".sif"))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def build_image(
    store: ImageStore,
    base: Base,
    project: Project,
    requirements: Sequence[str],
    work: Path,
    *,
    say: Callable[[str], None],
    heard: Callable[[str], None],
) -> Image:
    """Return a project's image, which is built if missing. Blocks for about 20 s."""
    inputs = (project.commit, project.import_paths, sorted(requirements), base.identity, base.python, base.site, LAYOUT)
    name = f"swe-{project.label}-{digest(repr((*inputs, project.metadata.entry_points)).encode())[:10]}"
    if (there := store.find(name)) is not None:
        return there
    tree = work / "tree"
    site = tree / base.site.lstrip("/")
    site.mkdir(parents=True)
    if requirements:
        pip(
            *("install", "--quiet", "--target", str(site), "--python-version", base.python, "--only-binary=:all:"),
            *("--no-compile", "--no-warn-conflicts", *requirements),
            folder=work,
            problem=f"the test dependencies of {project.label} cannot be installed ({', '.join(requirements)})",
        )
    _check_without(project, site)
    _check_copies(project, (base.image, site))
    shutil.rmtree(site / "bin", ignore_errors=True)  # scripts that name this machine's Python
    _describe(project, site)
    same_python = base.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    if same_python:
        compileall.compile_dir(site, quiet=2, ddir=base.site)
    archive = work / "tree.tar"
    with tarfile.open(archive, "w") as content:
        content.add(tree, ".", filter=_plain)
        content.add(project.folder, TESTBED.lstrip("/"), filter=_plain)
    shutil.rmtree(tree)
    with lock_image(base.image):
        definition = work / "image.def"
        definition.write_text(_definition(base, archive, compile_there=not same_python))
        image = store.build(str(definition), name, say=say, heard=heard).image
        share_files(base.image, image.path)
    archive.unlink()
    return image


def share_files(base: Path, image: Path) -> int:
    """Hard-link an image's files that equal its base's; return the saved bytes.

    No sandbox can change them: images lie below an overlay, or are read-only.
    """
    saved = 0
    for path, status in _files(image):
        twin = base / path.relative_to(image)
        try:
            other = twin.lstat()
            same = (status.st_mode, status.st_uid, status.st_gid, status.st_size) == (
                *(other.st_mode, other.st_uid, other.st_gid, other.st_size),
            )
            if not same or status.st_ino == other.st_ino or not filecmp.cmp(path, twin, shallow=False):
                continue
            fresh = path.with_name(f".{path.name[:200]}.shared")
            os.link(twin, fresh)
            fresh.rename(path)
        except OSError:
            continue  # on another disk, or with too many links: they stay two files
        saved += status.st_size
    return saved


def _definition(base: Base, archive: Path, *, compile_there: bool) -> str:
    for path in (base.image, archive):
        if re.search(r"[\s\"'$`\\]", str(path)):
            raise ConfigError(f"{path}: Apptainer takes no path with spaces or quotes in a definition", key="images")
    text = (
        f"Bootstrap: localimage\nFrom: {base.image}\n\n"
        f'%setup\n    tar --extract --no-same-owner --file={archive} --directory="$APPTAINER_ROOTFS"\n'
    )
    # Tests run without writing bytecode, so that each run would compile pytest again.
    return text + (f"\n%post\n    python3 -I -m compileall -q {base.site} || true\n" if compile_there else "")


def _describe(project: Project, site: Path) -> None:
    metadata = project.metadata
    paths = [TESTBED if each == "." else f"{TESTBED}/{each}" for each in project.import_paths]
    (site / "prorl-testbed.pth").write_text("\n".join(paths) + "\n")
    folder = site / f"{re.sub('[^A-Za-z0-9.]+', '_', metadata.name)}-{metadata.version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata.name}\nVersion: {metadata.version}\n")
    if metadata.entry_points:
        (folder / "entry_points.txt").write_text(metadata.entry_points)


def _check_without(project: Project, site: Path) -> None:
    """Raise `ConfigError` if the dependencies include the project itself."""
    own = canonicalize_name(project.metadata.name)
    for each in site.glob("*.dist-info"):
        if canonicalize_name(each.name.removesuffix(".dist-info").rpartition("-")[0]) == own:
            raise ConfigError(
                f"{own} is among what its own tests need (pytest or another dependency needs it), so its image would "
                "hold its source a second time; it cannot be used",
                key="repo",
            )


def _check_copies(project: Project, places: Sequence[Path]) -> None:
    """Raise `ConfigError` if the base image or a dependency has a copy of one of the project's modules."""
    own: dict[int, list[Path]] = {}
    for path in project.folder.rglob("*.py"):
        if (size := path.stat().st_size) > MODULE_BYTES:
            own.setdefault(size, []).append(path)
    for place in places:
        for path, status in _files(place):
            same_size = own.get(status.st_size, []) if path.suffix == ".py" else []
            for module in same_size:
                if filecmp.cmp(path, module, shallow=False):
                    raise ConfigError(
                        f"the base image or a dependency has a copy of {module.relative_to(project.folder)}, in "
                        f"{path.relative_to(place)}, where an agent could read the answer",
                        key="base",
                    )


def _files(image: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder, folders, names in os.walk(image):
        if Path(folder) == image:
            folders[:] = [each for each in folders if each not in NOT_PART]
        for name in names:
            path = Path(folder) / name
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield path, status


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    entry.mtime = int(entry.mtime) if entry.name.endswith((".py", ".pyc")) else FILE_TIME_S
    return entry
