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
    """Names this life of the supervisor to its children."""
    front_doors: Callable[[], list[str]]
    """Raises `RequestTimeout` while a rollout broker has not been announced."""
    backend_broker: Callable[[], str]
    """Empty: not announced."""
    keys: Path | str
    """Those that engines are reported with, of one of `roles`."""
    roles: tuple[KeyRole, ...]
    client_keys: Path | str
    node_id: str = ""
    """As which a node reports its stage processes as one; empty: each reports by itself."""


def fixed_places(topology: Topology) -> BrokerPlaces:
    """Return the places that a topology names."""
    door, backends = topology.rollout_broker.front_door, topology.backend_broker.endpoint
    keys = topology.security.keys
    return BrokerPlaces(
        new_id(), lambda: [topology.endpoint(door)], lambda: topology.endpoint(backends), keys, BROKER, keys
    )


def node_id(node: str, service_id: str) -> str:
    """Return the name of one life of a node."""
    return f"{node}-{service_id[:8]}"


def announced_places(folder: ServiceFolder, node: str, *, of_ours: bool) -> BrokerPlaces:
    """Return the places that brokers announce in a folder: those of our own life of the service, or any."""
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
