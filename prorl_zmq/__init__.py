"""prorl_zmq: rollouts of LLM agents for RL training, as a ZeroMQ service.

A trainer needs a client, `Job` and `Trajectory`, all of them here; the rest of the package is the service's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import ProrlError
from .wire.messages.backends import Backend
from .wire.messages.jobs import EpisodeLimits, Harness, Job, Outcome, PhaseLimits, Sampling

if TYPE_CHECKING:
    from .client.asynchronous.client import AsyncRolloutClient
    from .client.batch_progress import mean_reward
    from .client.blocking.client import RolloutClient
    from .data.collation import collate
    from .data.group import Group
    from .data.trajectory import Role, Trajectory

__all__ = [
    "AsyncRolloutClient",
    "Backend",
    "EpisodeLimits",
    "Group",
    "Harness",
    "Job",
    "Outcome",
    "PhaseLimits",
    "ProrlError",
    "Role",
    "RolloutClient",
    "Sampling",
    "Trajectory",
    "collate",
    "errors",
    "mean_reward",
]


_LATE = {
    "AsyncRolloutClient": "client.asynchronous.client",
    "Group": "data.group",
    "RolloutClient": "client.blocking.client",
    "Role": "data.trajectory",
    "Trajectory": "data.trajectory",
    "collate": "data.collation",
    "mean_reward": "client.batch_progress",
}
"""Where names are that import ZeroMQ, numpy or asyncio, which an execution server does not need."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATE[name]}", __name__), name)
    globals()[name] = value
    return value
