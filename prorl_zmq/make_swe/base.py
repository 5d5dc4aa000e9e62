"""The base image below all projects' images: a root filesystem with Python 3.9 or newer and git.

It is one of the image store by name, or built from a source as `prorl image build` does. What its Python is like is
asked in a sandbox: the version decides which dependencies fit, the site folder where they go.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import ConfigError, SandboxFailed
from ..tools.images.fingerprint import digest
from ..tools.sandbox.specification import SandboxSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..tools.images.image import Image
    from ..tools.images.image_store import ImageStore
    from ..tools.sandbox.sandboxes import Sandboxes

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
"""The same where debootstrap cannot be used, from a registry."""
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
    """Digest of what it was built from."""
    python: str
    """Such as `3.11`."""
    site: str
    """Where packages of its Python are, such as `/usr/local/lib/python3.11/dist-packages`."""


def find_base(store: ImageStore, base: str, say: Callable[[str], None], heard: Callable[[str], None]) -> Image:
    """Return the base image, built if it is not there. Blocks: up to minutes if it is built."""
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
