"""`Recipe`: the projects of a set with their checksums, as a TOML file. The package has `swe-mini`.

name = "swe-mini"
seed = 1
[[project]]
source = "humanize==4.9.0"
sha256 = "582a265c931c…"
instances = 4
requirements = ["pytest==8.3.5", "freezegun==1.5.1"]
"""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import ConfigError

OWN = ("swe-mini",)


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    instances: Annotated[int, Meta(ge=1, le=1000)] = 4
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """Of the source archive; empty: not checked."""
    requirements: tuple[str, ...] | None = None
    """All test dependencies; None: pytest, and those in the project's metadata."""
    more_requirements: tuple[str, ...] = ()
    """Additional dependencies."""
    tests: tuple[str, ...] = ()
    """Files and folders with tests; empty: pytest's default."""
    options: tuple[str, ...] = ()
    """Of pytest."""
    path: str = ""
    """The folder of the modules; empty: detected."""
    permissive_only: bool = False
    """Reject projects without a permissive license."""


class Settings(msgspec.Struct, frozen=True):
    """The settings of all projects of a run."""

    seed: int = 0
    base: str = ""
    """The base image; see `project_image.find_base`."""
    jobs: int = 1
    """Most sandboxes at a time."""
    most_failing: float = 0.2
    """Largest share of tests that a bug may break."""
    limit_s: float = 300.0
    """Of all tests of a project."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    project: tuple[Order, ...]
    name: str = ""
    seed: int = 0


def load_recipe(name: str) -> Recipe:
    """Read a recipe of this package by name, or a file."""
    try:
        if name in OWN:
            text = files(__package__).joinpath(f"{name.replace('-', '_')}.toml").read_text("utf-8")
        else:
            text = Path(name).read_text("utf-8")
        recipe = msgspec.convert(tomllib.loads(text), Recipe)
    except OSError as error:
        known = ", ".join(OWN)
        raise ConfigError(
            f"the recipe {name} cannot be read: {error.strerror}; there are {known}", key="recipe"
        ) from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {name} is malformed: {error}", key="recipe") from error
    for order in recipe.project:
        if re.fullmatch(r"[\w.-]+==.+", order.source) and not order.sha256:
            raise ConfigError(f"the recipe {name} has no sha256 for {order.source}", key="recipe")
    projects = tuple(msgspec.structs.replace(order, permissive_only=True) for order in recipe.project)
    return msgspec.structs.replace(recipe, project=projects)
