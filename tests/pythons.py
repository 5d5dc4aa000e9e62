"""Containers with a Python in them, for the tests of sessions that run cells."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from needed import usable
from rootfs import root_filesystem

from prorl_zmq.tools.containers.kinds import container_class
from prorl_zmq.tools.containers.specification import Bind, SandboxSpec
from prorl_zmq.tools.sessions.ipython_session import IPythonSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_zmq.tools.containers.container import Container

Run = Callable[..., None]
Body = Callable[[IPythonSession], Awaitable[None]]
LIMIT_S = 60.0
"""For cells that should be done at once, on a machine that may be busy."""
PACKAGES = str(Path(importlib.util.find_spec("IPython").origin).parents[1])  # type: ignore[union-attr, arg-type]


def specification(place: str) -> tuple[Any, SandboxSpec]:
    """Give the kind of container for a place and how to make it; skips the test where this machine cannot."""
    kind: Any = "bubblewrap" if place in ("bubblewrap", "image") else place
    usable(kind)
    if place in ("image", "apptainer"):  # a Python without IPython
        return kind, SandboxSpec(image=str(root_filesystem()))
    shown = {PACKAGES, sys.prefix, sys.base_prefix} if kind == "bubblewrap" else set()
    binds = tuple(Bind(path, path) for path in sorted(shown) if not path.startswith("/usr"))
    return kind, SandboxSpec(binds=binds, environment={"PYTHONPATH": PACKAGES})


def interpreter(place: str) -> str:
    return sys.executable if place in ("process", "bubblewrap") else "python3"


@contextlib.asynccontextmanager
async def live(place: str, folder: Path) -> AsyncIterator[Container]:
    """Start a container in this very process."""
    kind, spec = specification(place)
    path = folder / "container"
    for name in ("workspace", "tmp", "shm"):
        (path / name).mkdir(parents=True, exist_ok=True)
    container = container_class(kind)(path, spec)
    await container.start()
    try:
        yield container
    finally:
        await container.close()
        container.reap_orphans()


def use(place: str, folder: Path, body: Callable[[Container], Awaitable[None]], runner: Callable[..., object]) -> None:
    """Run `body` on a new container, and see that no descriptor is left open."""

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    specification(place)  # an image that it needs is held open from now on

    async def main() -> None:
        before = descriptors()
        async with live(place, folder) as container:
            await body(container)
        assert descriptors() == before

    runner(main())


def runner_of(place: str, folder: Path) -> Run:
    """Give a function that runs a body on a started session there."""

    def run(body: Body, runner: Callable[..., object] = uvloop.run, **options: Any) -> None:
        async def main(container: Container) -> None:
            session = IPythonSession(container, python=interpreter(place), **options)
            try:
                await session.start()
                await body(session)
            finally:
                await session.close()
                await session.close()

        use(place, folder, main, runner)

    return run
