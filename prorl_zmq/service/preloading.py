"""Which modules the fork server imports for each kind of process of a service."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..system.fork_server import ForkServer, Preload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .process_plans import AnyPlan

SHARED = ("prorl_zmq.commands.children", "prorl_zmq.metrics.reporter", "uvloop")
"""Needed by every service: imported while its topology is read."""
STAGE = (
    *("prorl_zmq.stages.stage_process", "prorl_zmq.stages.handler"),
    Preload(group="prorl_zmq.handlers", what="task"),
)
GATEWAY = ("prorl_zmq.gateway.server", "prorl_zmq.gateway.settings")
BY_PROCESS: dict[str, tuple[str | Preload, ...]] = {
    "rollout_broker": ("prorl_zmq.brokers.rollout.rollout_broker", "prorl_zmq.brokers.journal.journal"),
    "backend_broker": ("prorl_zmq.brokers.backends.backend_broker", "prorl_zmq.brokers.backends.backend_journal"),
    "node_broker": (
        *("prorl_zmq.brokers.node.node_broker", "prorl_zmq.tools.node_facts"),
        *("prorl_zmq.service.broker_places", "prorl_zmq.service.child_plans"),
    ),
    "engine": (
        *("prorl_zmq.inference.hosting.host", "prorl_zmq.inference.hosting.builtin_kinds"),
        *("prorl_zmq.inference.embedded.embedded_engine", "prorl_zmq.inference.policy"),
    ),
    **dict.fromkeys(("stage_init", "stage_run", "stage_eval", "stage_score"), STAGE),
    **dict.fromkeys(("gateway", "dashboard", "metrics"), GATEWAY),
}


@contextmanager
def begun_fork_server() -> Iterator[ForkServer]:
    """Yield a fork server that imports what every service needs, while this process imports and checks its command.

    Nested contexts share the outer one's server.
    """
    if _begun:
        yield _begun[0]
        return
    with ForkServer(SHARED) as server:
        server.begin()
        _begun.append(server)
        try:
            yield server
        finally:
            _begun.clear()


_begun: list[ForkServer] = []
"""The fork server of this process."""


def preloaded_for(plan: AnyPlan) -> tuple[str | Preload, ...]:
    """Return the modules to import for this process."""
    return (*SHARED, *BY_PROCESS[plan.process])
