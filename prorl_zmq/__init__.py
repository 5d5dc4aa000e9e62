"""prorl_zmq: rollouts of LLM agents for RL training, as a ZeroMQ service.

A trainer needs a client, `Job` and `Trajectory`, all of them here; the rest of the package is the service's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
    from .client.asynchronous.client import AsyncRolloutClient
    from .client.batch_progress import mean_reward
    from .client.blocking.client import RolloutClient
    from .data.collation import collate
    from .data.group import Group
    from .data.trajectory import Role, Trajectory
    from .errors import ProrlError
    from .wire.messages.backends import Backend
    from .wire.messages.jobs import EpisodeLimits, Harness, Job, NamedModel, Outcome, PhaseLimits, Sampling

__all__ = [
    "AsyncRolloutClient",
    "Backend",
    "EpisodeLimits",
    "Group",
    "Harness",
    "Job",
    "NamedModel",
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
    "Backend": "wire.messages.backends",
    "EpisodeLimits": "wire.messages.jobs",
    "Group": "data.group",
    "Harness": "wire.messages.jobs",
    "Job": "wire.messages.jobs",
    "NamedModel": "wire.messages.jobs",
    "Outcome": "wire.messages.jobs",
    "PhaseLimits": "wire.messages.jobs",
    "ProrlError": "errors",
    "RolloutClient": "client.blocking.client",
    "Role": "data.trajectory",
    "Sampling": "wire.messages.jobs",
    "Trajectory": "data.trajectory",
    "collate": "data.collation",
    "mean_reward": "client.batch_progress",
}
"""Where names are: a program imports what it uses, since numpy alone takes longer than most commands."""


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(".errors", __name__)
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATE[name]}", __name__), name)
    globals()[name] = value
    return value
