"""Requests of `prorl drain`: one file per node, which the node removes when it accepts the request.

They are in `nodes/` of a service's folder, or in the run folder of a service without one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import ConfigError, RequestTimeout
from ..wire.messages.nodes import NodeState
from .service_folder import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .node_rows import NodeRow

LOOK_S = 0.1
LIMIT_S = 20.0
"""Nodes look every second; a network file system may show them a file some seconds late."""


class DrainRequests:
    """Requests that nodes drain and exit, as files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, node: str) -> None:
        """Request that a node drains, wherever it runs."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        write_whole(self._request(node), "")

    def withdraw(self, node: str) -> bool:
        """Remove a node's request, as the node itself does to accept it; return whether there was one."""
        try:
            self._request(node).unlink()
        except OSError:  # there is none, or the file system is unavailable
            return False
        return True

    def is_waiting(self, node: str) -> bool:
        """Return whether a node has not accepted the request yet."""
        return self._request(node).exists()

    def _request(self, node: str) -> Path:
        return self._folder / f"{node}.drain"


def drain_nodes(
    requests: DrainRequests, nodes: Sequence[NodeRow], name: str | None, limit_s: float = LIMIT_S
) -> list[NodeRow]:
    """Have the nodes with this name or host drain and exit (None: all); return them after they have accepted.

    Raises:
        ConfigError: no node has that name or host.
        RequestTimeout: some have not accepted; their requests are withdrawn.
    """
    chosen = [one for one in nodes if one.state != NodeState.LOST and name in (None, one.node, one.host)]
    if name is not None and not chosen:
        known = ", ".join(one.node for one in nodes) or "none"
        raise ConfigError(f"there is no node or host {name} here; nodes: {known} (see `prorl nodes`)", key="node")
    asked = [one for one in chosen if one.state != NodeState.DRAINING]
    for one in asked:
        requests.ask(one.node)
    until = time.monotonic() + limit_s
    while waiting := [one.node for one in asked if requests.is_waiting(one.node)]:
        if time.monotonic() > until:
            silent = [node for node in waiting if requests.withdraw(node)]
            if not silent:
                break
            raise RequestTimeout(
                f"{', '.join(silent)} did not answer within {limit_s:.0f} s: `prorl drain` reaches the nodes of `prorl "
                "node` and `prorl serve` that see the service's folder. A `prorl-stage` that was started by itself "
                "drains on SIGUSR1",
                timeout_s=limit_s,
            )
        time.sleep(LOOK_S)
    return chosen
