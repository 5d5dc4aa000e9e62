"""Each kind of sandbox that this machine can make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import rootfs
from needed import usable

from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["apptainer", "bubblewrap", "process"])
def kind(request: pytest.FixtureRequest) -> Any:
    """A kind of sandbox; skipped where this machine cannot make it."""
    usable(request.param)
    return request.param


@pytest.fixture
def sandboxes(kind: Any, tmp_path: Path) -> Iterator[Sandboxes]:
    """Sandboxes of that kind."""
    image = str(rootfs.root_filesystem()) if kind == "apptainer" else ""
    made = Sandboxes(kind, tmp_path / "sandboxes", image=image)
    yield made
    made.close()
