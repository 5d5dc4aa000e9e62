"""prorl_zmq: rollouts of LLM agents for RL training, as a ZeroMQ service.

A trainer needs a client, `Job` and `Trajectory`, all of them here; the rest of the package is the service's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors
from .client import RolloutClient
from .errors import ProrlError
from .messages import Backend, EpisodeLimits, Job, Outcome, PhaseLimits, Sampling
from .trajectory import Role, Trajectory

if TYPE_CHECKING:
    from .async_client import AsyncRolloutClient

__all__ = [
    "AsyncRolloutClient",
    "Backend",
    "EpisodeLimits",
    "Job",
    "Outcome",
    "PhaseLimits",
    "ProrlError",
    "Role",
    "RolloutClient",
    "Sampling",
    "Trajectory",
    "errors",
]


def __getattr__(name: str) -> Any:
    """Import the asynchronous client when it is first asked for: asyncio is half of what the whole package costs."""
    if name == "AsyncRolloutClient":
        from .async_client import AsyncRolloutClient

        return AsyncRolloutClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
