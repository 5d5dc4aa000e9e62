"""`BrokerPlaces`: where a supervisor finds the brokers, and with which keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..security.keyring import BROKER, WORKER
from ..wire.messages.base import KeyRole, new_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..config import Topology
    from .service_folder import ServiceFolder


@dataclass(frozen=True, slots=True)
class BrokerPlaces:
    service_id: str
    """Identifies this life of the supervisor to its children."""
    front_doors: Callable[[], list[str]]
    """Raises `RequestTimeout` while a rollout broker has not been announced."""
    backend_broker: Callable[[], str]
    """Returns an empty string while it is not announced."""
    keys: Path | str
    """For reporting engine starts, with a key of one of `roles`."""
    roles: tuple[KeyRole, ...]
    client_keys: Path | str
    node_id: str = ""
    """The name under which a node reports its stage processes as one; empty: each reports by itself."""


def fixed_places(topology: Topology) -> BrokerPlaces:
    """Return the places in a topology."""
    door, backends = topology.rollout_broker.front_door, topology.backend_broker.endpoint
    keys = topology.security.keys
    return BrokerPlaces(
        new_id(), lambda: [topology.endpoint(door)], lambda: topology.endpoint(backends), keys, BROKER, keys
    )


def node_id(node: str, service_id: str) -> str:
    """Return the name of one life of a node."""
    return f"{node}-{service_id[:8]}"


def announced_places(folder: ServiceFolder, node: str, *, of_ours: bool) -> BrokerPlaces:
    """Return the places that brokers announce in a folder: in this life of the service if `of_ours`, else in any."""
    service_id = new_id()
    life = service_id if of_ours else ""

    def front_doors() -> list[str]:
        folder.wait_for(folder.rollout_brokers, 0.0, life)
        return [folder.broker_endpoints()[name]["front_door"] for name in folder.rollout_brokers]

    return BrokerPlaces(
        service_id,
        front_doors,
        lambda: folder.backend_broker(life),
        folder.keys("node"),
        WORKER,
        folder.keys("client"),
        node_id(node, service_id),
    )
