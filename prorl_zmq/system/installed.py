"""Reads the installed versions, so that a running process can detect an upgrade."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.metadata import Distribution, EntryPoint

OURS = "prorl-zmq"


class Installed(NamedTuple):
    version: str
    record: str
    """A digest of the package's file list with its hashes; empty: the package has no such list."""


def installed(points: Iterable[EntryPoint]) -> dict[str, Installed]:
    """Return prorl-zmq, and the packages that offer entry points, by name."""
    from importlib.metadata import PackageNotFoundError, distribution

    # A package without metadata has no name.
    found = {point.dist.name: _look(point.dist) for point in points if point.dist is not None and point.dist.name}
    with suppress(PackageNotFoundError):
        found[OURS] = _look(distribution(OURS))
    return found


def changes(before: Mapping[str, Installed], now: Mapping[str, Installed]) -> list[str]:
    """Return messages about what was upgraded, installed or removed."""
    words = []
    for name in sorted(before.keys() | now.keys()):
        was, is_now = before.get(name), now.get(name)
        if was is None and is_now is not None:
            words.append(f"{name} {is_now.version} was installed")
        elif is_now is None:
            words.append(f"{name} was removed")
        elif was is not None and was.version != is_now.version:
            words.append(f"{name} was upgraded from {was.version} to {is_now.version}")
        elif was != is_now:
            words.append(f"{name} {is_now.version} was installed again")
    return words


def modified(files: Iterable[str]) -> dict[str, int]:
    """Return files' modification times in nanoseconds, without missing files."""
    found = {}
    for file in files:
        with suppress(OSError):
            found[file] = os.stat(file).st_mtime_ns  # noqa: PTH116
    return found


def _look(package: Distribution) -> Installed:
    import hashlib

    record = package.read_text("RECORD") or ""
    return Installed(package.version, hashlib.sha256(record.encode()).hexdigest() if record else "")
