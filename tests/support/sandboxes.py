"""Sandboxes that tests share: one object per kind and pytest process. Each start of a spawner takes 0.4 CPU seconds."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import rootfs
from needed import usable

from prorl_zmq.tools.containers.kinds import problem_with
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.wire.messages.jobs import SandboxKind

KINDS = ("apptainer", "bubblewrap", "process")
on_each_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
"""The contract of a sandbox: these tests run on each kind, others on the main one, and on the rest as proofs."""
on_isolated_kinds = pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
"""The promises of isolation, on each kind that makes them."""


@cache
def main_kind() -> str:
    """Return the kind on which the whole suite runs."""
    return "process" if problem_with("bubblewrap") else "bubblewrap"


def main_and_proofs(*kinds: str) -> list[Any]:
    """Return kinds as parameters; tests of all but the main kind are proofs."""
    return [pytest.param(kind, marks=[] if kind == main_kind() else pytest.mark.proof) for kind in kinds or KINDS]


def default_image(kind: str) -> str:
    """Return the image of sandboxes of a kind that needs one."""
    return str(rootfs.root_filesystem()) if kind == "apptainer" else ""


class SharedSandboxes:
    """One `Sandboxes` per kind. Tests that look at its spawner, folder or environment make their own instead."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._made: dict[tuple[str, bool], Sandboxes] = {}

    def __call__(self, kind: SandboxKind, *, with_image: bool = True) -> Sandboxes:
        """Return the sandboxes of a kind, with a default image if the kind needs one.

        Skips the test if this machine cannot make them.
        """
        usable(kind)
        key = kind, with_image
        if key not in self._made:
            image = default_image(kind) if with_image else ""
            self._made[key] = Sandboxes(kind, self._folders.mktemp("shared") / "sandboxes", image=image)
        return self._made[key]

    def drop_used(self) -> None:
        """Drop what a test has left sandboxes in, so that the next test begins with an empty folder."""
        for key, made in tuple(self._made.items()):
            if made.root.exists() and any(made.root.iterdir()):
                made.close()
                del self._made[key]

    def close(self) -> None:
        for made in self._made.values():
            made.close()


@pytest.fixture(scope="session")
def shared_sandboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSandboxes]:
    shared = SharedSandboxes(tmp_path_factory)
    yield shared
    shared.close()


@pytest.fixture
def sandboxes_of(shared_sandboxes: SharedSandboxes) -> Iterator[SharedSandboxes]:
    """Give the shared sandboxes of a kind, which are empty at the start of each test."""
    yield shared_sandboxes
    shared_sandboxes.drop_used()
