"""What the tests of the tools share: each kind of sandbox that this machine can make, and a look at the processes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import rootfs
from needed import usable
from support.sandboxes import default_image, main_and_proofs

from prorl_zmq.tools.containers.kinds import container_class
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from support.sandboxes import SharedSandboxes

    from prorl_zmq.tools.containers.container import Container
    from prorl_zmq.wire.messages.jobs import SandboxKind


@pytest.fixture(params=main_and_proofs())
def kind(request: pytest.FixtureRequest) -> Any:
    """A kind of sandbox; the test is skipped if this machine cannot make it."""
    usable(request.param)
    return request.param


@pytest.fixture
def image(kind: SandboxKind) -> str:
    """The image of sandboxes of that kind, if it needs one."""
    return default_image(kind)


@pytest.fixture
def root_filesystem() -> Path:
    """A Debian with Python; not to be changed."""
    return rootfs.root_filesystem()


@pytest.fixture
def small_image(tmp_path: Path) -> Path:
    """A root filesystem of a few programs, this test's own."""
    return rootfs.tiny_root_filesystem(tmp_path / "small")


@pytest.fixture(scope="session")
def sif(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small root filesystem as a SIF file."""
    usable("apptainer")
    folder = tmp_path_factory.mktemp("sif")
    image = folder / "image.sif"
    tiny = rootfs.tiny_root_filesystem(folder / "small")
    subprocess.run(["apptainer", "--quiet", "build", str(image), str(tiny)], check=True, capture_output=True)
    image.chmod(0o644)
    return str(image)


@pytest.fixture
def sandboxes(kind: SandboxKind, sandboxes_of: SharedSandboxes) -> Sandboxes:
    """Sandboxes of that kind, shared with other tests and empty."""
    return sandboxes_of(kind)


@pytest.fixture
def own_sandboxes(kind: SandboxKind, image: str, tmp_path: Path) -> Iterator[Sandboxes]:
    """Sandboxes of that kind below the test's folder, started with its environment."""
    made = Sandboxes(kind, tmp_path / "sandboxes", image=image)
    yield made
    made.close()


@pytest.fixture
def live_container(
    kind: SandboxKind, image: str, tmp_path: Path
) -> Callable[[], contextlib.AbstractAsyncContextManager[Container]]:
    """Start a container of that kind in this very process, without an execution server."""

    @contextlib.asynccontextmanager
    async def live() -> AsyncIterator[Container]:
        path = tmp_path / "container"
        for name in ("workspace", "tmp", "shm"):
            (path / name).mkdir(parents=True, exist_ok=True)
        container = container_class(kind)(path, SandboxSpec(image=image))
        await container.start()
        try:
            yield container
        finally:
            await container.close()
            container.reap_orphans()

    return live


@pytest.fixture
def survivors() -> Callable[[str], list[str]]:
    """Give the command lines of processes with a mark in them, once they have had 20 s to go away."""

    def look(mark: str) -> list[str]:
        deadline = time.monotonic() + 20
        while found := running(mark):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return found

    return look


def running(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found
