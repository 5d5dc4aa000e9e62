"""Apptainer definition files (`.def`), and Jinja2 templates of them (`.def.j2`).

Only the header of each stage is read here, for the base image's identity and for an early, clear error; the rest is
Apptainer's. spython's parser cannot be used: it rejects every header but Docker's and lower-cases image names.

Paths in a definition are relative to its own folder. Changes of files that it copies (`%files`) are not detected: build
with mode scratch then, or name one in a lock file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
from jinja2 import meta

from ...errors import ConfigError
from .fingerprint import digest, file_digest, tree_digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUFFIX, TEMPLATE_SUFFIX = ".def", ".def.j2"
SIZE_LIMIT_BYTES = 2**20
LOCAL_AGENTS = frozenset({"localimage", "oci", "oci-archive", "docker-archive"})
"""Bootstrap agents whose `From` is a path."""


@dataclass(frozen=True)
class Definition:
    path: Path
    text: str
    """The file's content, or the template filled in."""
    bases: tuple[tuple[str, str], ...]
    """The base image of each stage, as (bootstrap agent, reference or path)."""

    def __str__(self) -> str:
        return str(self.path)

    def base(self) -> str:
        """Identify the base images: local ones by content, others by reference."""
        return digest(repr((self.bases, [_identity(path) for path in self.local_bases()])).encode())

    def local_bases(self) -> list[Path]:
        return [self.path.parent / base for agent, base in self.bases if agent in LOCAL_AGENTS and base]


def load_definition(path: Path, variables: Mapping[str, str], lock_file: Path | None = None) -> Definition:
    """Read a definition; render it if it is a template, with the path of the lock file as `lock_file`."""
    text = _read(path)
    if path.name.endswith(TEMPLATE_SUFFIX):
        given = {"lock_file": str(lock_file.absolute())} if lock_file is not None else {}
        text = _fill_in(path, text, variables, given)
    elif variables:
        raise ConfigError(
            f"{path} is not a template, so there is nothing to set ({', '.join(sorted(variables))}); "
            f"templates are called NAME{TEMPLATE_SUFFIX}",
            key="set",
        )
    return Definition(path.absolute(), text, _bases(path, text))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_LIMIT_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"the definition {path} cannot be read: {error.strerror}", key="source") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a definition: it is not UTF-8 text", key="source") from error
    if len(data) > SIZE_LIMIT_BYTES:
        raise ConfigError(f"{path} is not a definition: it is larger than {SIZE_LIMIT_BYTES} bytes", key="source")
    return text


def _fill_in(path: Path, text: str, variables: Mapping[str, str], given: Mapping[str, str]) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(path.parent),
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - a definition is no HTML
    )
    try:
        tree = environment.parse(text, filename=str(path))
        unused = set(variables) - meta.find_undeclared_variables(tree)
        # A template that includes others may use a variable there.
        if unused and not list(meta.find_referenced_templates(tree)):
            raise ConfigError(f"{path} has no variable {', '.join(sorted(unused))}", key="set")
        return environment.from_string(text).render({**given, **variables})
    except jinja2.UndefinedError as error:
        raise ConfigError(
            f"the template {path} cannot be filled in: {error.message}; give it with --set NAME=VALUE", key="set"
        ) from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{error.filename or path}, line {error.lineno}: {error.message}", key="source") from error
    except jinja2.TemplateNotFound as error:
        raise ConfigError(f"the template {path} includes {error.name}, which is not there", key="source") from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"the template {path} cannot be filled in: {error}", key="source") from error


def _bases(path: Path, text: str) -> tuple[tuple[str, str], ...]:
    bases: list[dict[str, str]] = []
    in_header = True
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.partition("#")[0].strip()
        key, colon, value = (part.strip() for part in plain.partition(":"))
        if plain.startswith("%"):
            in_header = False
        elif key.lower() == "bootstrap" and colon:
            in_header = True
            bases.append({"bootstrap": value})
        elif plain and in_header:
            if not colon:
                raise ConfigError(
                    f"{path}, line {number}: {plain[:80]!r} is neither 'Key: value' nor the start of a section (%post)",
                    key="source",
                )
            if not bases:
                raise ConfigError(f"{path}, line {number}: a definition begins with 'Bootstrap: …'", key="source")
            bases[-1][key.lower()] = value
    if not bases:
        raise ConfigError(f"{path} is not a definition: it has no line 'Bootstrap: …'", key="source")
    return tuple((base["bootstrap"].lower(), base.get("from", "")) for base in bases)


def _identity(path: Path) -> str:
    try:
        return tree_digest(path) if path.is_dir() else file_digest(path)
    except OSError as error:
        raise ConfigError(f"the base image {path} cannot be read: {error.strerror}", key="source") from error
