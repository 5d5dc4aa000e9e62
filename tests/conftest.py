"""For all tests: Hypothesis without deadlines, since the machines that run it are shared; and one real vLLM server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from vllm_server import VllmServer

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile(
    "quick",
    deadline=None,
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase != Phase.explain],  # it traces every line: ten times slower
)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=2000, stateful_step_count=80)
settings.load_profile("quick")


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM server for all tests that use one; half a minute to start. They are marked `vllm`."""
    with VllmServer(tmp_path_factory.mktemp("vllm-server")) as server:
        yield server
