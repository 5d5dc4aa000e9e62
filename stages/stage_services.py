"""`StageServices`: what the phases of one stage process share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..inference.client import EngineClient
    from ..tools.sandbox.sandboxes import Sandboxes
    from .backend_client import BackendClient
    from .grading.grader_pool import GraderPool
    from .harness.outside_rollout import RolloutDoor
    from .other_models import ChatEndpoints
    from .sandbox_handoff import SandboxHandoff


@dataclass(frozen=True, slots=True)
class StageServices:
    """The services of a stage process, which closes them."""

    stage_id: str
    sandboxes: Sandboxes
    backends: BackendClient
    engines: EngineClient
    handoff: SandboxHandoff
    graders: GraderPool
    endpoints: ChatEndpoints
    door: Callable[[], RolloutDoor]
    """Returns the server through which programs outside lead rollouts of this process."""
    mcp_keys: Mapping[str, str]
    """The addresses of the MCP servers that jobs may name, with the key for each."""
