"""What an image is built from, as it is written on a command line.

- `Dockerfile`, or a path that ends with it: built from its own folder.
- `image.def` or `image.def.j2`: an Apptainer definition, or a Jinja2 template of one.
- `rootfs`: a folder with a root filesystem.
- `image.sif`: a SIF file.
- `docker://debian:12`: an image of a registry, through Apptainer; also `oras://` and `library://`.
- `debootstrap://bookworm?include=python3,git&variant=minbase`: a Debian or Ubuntu from the package mirror that
  the machine's apt has, as root.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ...dockerfile.stages import Dockerfile, read_dockerfile
from ...errors import ConfigError, InvalidRecord
from .definition import SUFFIX, TEMPLATE_SUFFIX, Definition, load_definition
from .fingerprint import digest, file_digest, tree_digest
from .image import is_sif

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCKERFILE = "Dockerfile"
ARCHIVES = ("docker-archive:", "oci-archive:", "oci:")
REGISTRIES = ("docker://", "oras://", "library://")
DEBOOTSTRAP = "debootstrap://"
SUITE_PATTERN = re.compile(r"[a-z][a-z0-9.-]{0,63}")
PACKAGE_PATTERN = re.compile(r"[a-z0-9][a-z0-9+.-]*")
VARIANTS = ("minbase", "buildd", "standard")
MIRROR_PATTERN = re.compile(r"(https?|file|ftp)://?\S+")


@dataclass(frozen=True)
class _PathSource:
    path: Path

    def __str__(self) -> str:
        return str(self.path)


class DirectorySource(_PathSource):
    def base(self) -> str:
        return tree_digest(self.path)


class SifSource(_PathSource):
    def base(self) -> str:
        return file_digest(self.path)


@dataclass(frozen=True)
class RegistrySource:
    reference: str

    def __str__(self) -> str:
        return self.reference

    def base(self) -> str:
        """Identify the base image by its reference: a moved tag is not detected; a digest is."""
        return self.reference


@dataclass(frozen=True)
class DebootstrapSource:
    suite: str
    include: tuple[str, ...] = ()
    variant: str = "minbase"
    mirror: str = ""
    """Empty: what this machine's apt has configured for the suite."""

    def __str__(self) -> str:
        include = f"include={','.join(self.include)}&" if self.include else ""
        return f"{DEBOOTSTRAP}{self.suite}?{include}variant={self.variant}"

    def base(self) -> str:
        """Identify the base image by the request: new versions of packages are not detected."""
        return str(self)


@dataclass(frozen=True)
class ArchiveSource:
    """An image in a file or folder that other programs write."""

    agent: str
    """`docker-archive`, `oci` or `oci-archive`: what Apptainer calls it."""
    path: Path

    def __str__(self) -> str:
        return f"{self.agent}:{self.path}"

    def base(self) -> str:
        return tree_digest(self.path) if self.path.is_dir() else file_digest(self.path)


@dataclass(frozen=True)
class DockerfileSource:
    dockerfile: Dockerfile
    bases: Mapping[str, Base]
    """What to use for each published image that it names."""

    def __str__(self) -> str:
        return str(self.dockerfile.path.absolute())

    def base(self) -> str:
        """Identify the base images and the folder; scripts are the definition."""
        named = {name: (str(source), source.base()) for name, source in sorted(self.bases.items())}
        return digest(repr((named, tree_digest(self.dockerfile.context.root))).encode())

    @property
    def text(self) -> str:
        """The scripts of all stages."""
        return "\n".join(stage.script for stage in self.dockerfile.stages)


# The identity of a source's base image is its `base()`.
Base = DirectorySource | SifSource | RegistrySource | ArchiveSource
Source = Base | Definition | DebootstrapSource | DockerfileSource


def parse_source(
    text: str,
    *,
    variables: Mapping[str, str] | None = None,
    lock_file: Path | None = None,
    mirror: str = "",
    bases: Mapping[str, Base] | None = None,
) -> Source:
    path = Path(text)
    if path.name == DOCKERFILE and "://" not in text:
        _none_for_others(text, variables=variables, mirror=mirror)
        return _parse_dockerfile(path, bases or {})
    if path.name.endswith((SUFFIX, TEMPLATE_SUFFIX)) and "://" not in text:
        _none_for_others(text, mirror=mirror)
        return load_definition(path, variables or {}, lock_file)
    _none_for_others(text, variables=variables)
    if text.startswith(DEBOOTSTRAP):
        return _parse_debootstrap(text, mirror)
    _none_for_others(text, mirror=mirror)
    if text.startswith(REGISTRIES):
        if not re.fullmatch(r"[a-z]+://[^\s?]+", text):
            raise ConfigError(f"{text!r} names no image", key="source")
        return RegistrySource(text)
    if text.startswith(ARCHIVES):
        return parse_base(text)
    if "://" in text:
        known = ", ".join((*REGISTRIES, DEBOOTSTRAP))
        raise ConfigError(f"{text}: images come from {known}, a definition, a folder or a SIF file", key="source")
    return _parse_path(path)


def parse_base(text: str) -> Base:
    """Return a base image: a folder, a SIF file, `docker-archive:FILE`, `oci:FOLDER` or `docker://IMAGE`."""
    if text.startswith(ARCHIVES):
        agent, _, name = text.partition(":")
        path = Path(name).absolute()
        if not path.exists():
            raise ConfigError(f"{text}: there is no {path}", key="source")
        return ArchiveSource(agent, path)
    source = parse_source(text)
    if isinstance(source, Definition | DebootstrapSource | DockerfileSource):
        raise ConfigError(f"{text} is no image, but what one is built from", key="base")
    return source


def same_image(reference: str) -> str:
    """Return the full name of a published image: `ubuntu` and `docker.io/library/ubuntu:latest` are the same."""
    name, at, pinned = reference.removeprefix("docker://").partition("@")
    if ":" not in name.rpartition("/")[2]:
        name += "" if at else ":latest"
    host, _, rest = name.partition("/")
    if not rest or not ("." in host or ":" in host or host == "localhost"):
        host, rest = "docker.io", name
    if host in ("docker.io", "index.docker.io") and "/" not in rest:
        rest = f"library/{rest}"
    return f"{host}/{rest}{at}{pinned}"


def base_of(reference: str, bases: Mapping[str, Base]) -> Base:
    """Return the base image for a published one: that of its name, with or without the digest, or from its registry."""
    given = {same_image(name): source for name, source in bases.items()}
    name = same_image(reference)
    return given.get(name) or given.get(name.partition("@")[0]) or RegistrySource(f"docker://{reference}")


def _parse_dockerfile(path: Path, bases: Mapping[str, Base]) -> DockerfileSource:
    try:
        dockerfile = read_dockerfile(path)
    except InvalidRecord as error:
        raise ConfigError(f"{path}, {error.message}", key="source") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', error)}", key="source") from error
    return DockerfileSource(dockerfile, {name: base_of(name, bases) for name in dockerfile.images()})


def check_sif(path: Path) -> None:
    """Check that a file is a SIF file by its first bytes: Apptainer would run any other as a definition."""
    try:
        known = is_sif(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key="source") from error
    if not known:
        raise ConfigError(
            f"{path} is no SIF file (definitions are called NAME{SUFFIX} or NAME{TEMPLATE_SUFFIX})", key="source"
        )


def _parse_path(path: Path) -> Source:
    if path.is_dir():
        if not any((path / name).is_dir() for name in ("bin", "usr")):
            raise ConfigError(f"{path} is not a root filesystem: it has neither bin nor usr", key="source")
        return DirectorySource(path.absolute())
    if not path.exists():
        raise ConfigError(f"there is no {path}; give a definition, a folder, a SIF file or docker://…", key="source")
    check_sif(path)
    return SifSource(path.absolute())


def _parse_debootstrap(text: str, mirror: str) -> DebootstrapSource:
    suite, _, query = text.removeprefix(DEBOOTSTRAP).partition("?")
    if not SUITE_PATTERN.fullmatch(suite):
        raise ConfigError(f"{text}: {suite!r} is not a suite; write {DEBOOTSTRAP}bookworm", key="source")
    # Not urllib's parse_qs, which takes the + of g++ for a space.
    given = {}
    for pair in filter(None, query.split("&")):
        key, _, value = pair.partition("=")
        if key not in ("include", "variant") or key in given:
            raise ConfigError(f"{text}: {key!r} is not one of include, variant, each once", key="source")
        given[key] = unquote(value)
    include = tuple(sorted(filter(None, given.get("include", "").split(","))))
    for package in include:
        if not PACKAGE_PATTERN.fullmatch(package):
            raise ConfigError(f"{text}: {package!r} is not the name of a package", key="source")
    variant = given.get("variant", VARIANTS[0])
    if variant not in VARIANTS:
        raise ConfigError(f"{text}: {variant!r} is not one of {', '.join(VARIANTS)}", key="source")
    if mirror and not MIRROR_PATTERN.fullmatch(mirror):
        raise ConfigError("the mirror is not an address such as http://HOST/debian", key="mirror")
    return DebootstrapSource(suite, include, variant, mirror)


def _none_for_others(text: str, *, variables: Mapping[str, str] | None = None, mirror: str = "") -> None:
    if variables:
        raise ConfigError(f"{text} is not a template (NAME{TEMPLATE_SUFFIX}), so there is nothing to set", key="set")
    if mirror:
        raise ConfigError(f"{text} needs no mirror; only {DEBOOTSTRAP}… has one", key="mirror")
