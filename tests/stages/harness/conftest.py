"""The sandboxes in which programs lead rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.sandboxes import main_and_proofs

if TYPE_CHECKING:
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes


@pytest.fixture(params=main_and_proofs())
def kind(request: pytest.FixtureRequest) -> Any:
    """A kind of sandbox."""
    return request.param


@pytest.fixture
def sandboxes(kind: Any, sandboxes_of: SharedSandboxes) -> Sandboxes:
    """Sandboxes of that kind; the test is skipped if this machine cannot make them."""
    return sandboxes_of(kind)
