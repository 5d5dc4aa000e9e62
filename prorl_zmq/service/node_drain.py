"""`prorl drain` of nodes that `prorl node` runs: a request for each in the service's folder, which the node takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import ConfigError, RequestTimeout
from ..wire.messages.nodes import NodeState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .node_rows import NodeRow
    from .service_folder import ServiceFolder

LOOK_S = 0.1
LIMIT_S = 20.0
"""Nodes look every second; a network file system may show them a file some seconds late."""


def drain_nodes(
    folder: ServiceFolder, nodes: Sequence[NodeRow], name: str | None, limit_s: float = LIMIT_S
) -> list[NodeRow]:
    """Have a node, by its name or host, drain and end; None: all. Return which ones do, once they have answered.

    Raises:
        ConfigError: there is no such node.
        RequestTimeout: some have not answered; their requests are withdrawn.
    """
    chosen = [one for one in nodes if one.state != NodeState.LOST and name in (None, one.node, one.host)]
    if name is not None and not chosen:
        known = ", ".join(one.node for one in nodes) or "none"
        raise ConfigError(f"there is no node or host {name} here; nodes: {known} (see `prorl nodes`)", key="node")
    asked = [one for one in chosen if one.state != NodeState.DRAINING]
    for one in asked:
        folder.ask_to_drain(one.node)
    until = time.monotonic() + limit_s
    while waiting := [one.node for one in asked if folder.is_asked_to_drain(one.node)]:
        if time.monotonic() > until:
            silent = [node for node in waiting if folder.take_drain_request(node)]
            if not silent:
                break
            raise RequestTimeout(
                f"{', '.join(silent)} did not answer within {limit_s:.0f} s: `prorl drain` reaches nodes of `prorl "
                f"node` that see {folder.path}. The node of `prorl serve` itself ends with it",
                timeout_s=limit_s,
            )
        time.sleep(LOOK_S)
    return chosen
