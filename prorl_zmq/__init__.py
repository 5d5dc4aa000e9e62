"""prorl_zmq: rollouts of LLM agents for RL training, as a ZeroMQ service.

A trainer needs a client, `Job` and `Trajectory`, all of them here; the rest of the package is the service's.
"""

from __future__ import annotations

from . import errors
from .async_client import AsyncRolloutClient
from .client import RolloutClient
from .errors import ProrlError
from .messages import Backend, EpisodeLimits, Job, Outcome, PhaseLimits, Sampling
from .trajectory import Role, Trajectory

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
