"""The addresses that a broker of a service's folder tries to bind: its previous one, then any free port.

Within one life of the service the backend broker keeps its port, since the rollout brokers were started with it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..config import SERVICE_VARIABLE, SecuritySettings
from .service_folder import BACKENDS, WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..config import Topology
    from .service_folder import ServiceFolder


def rollout_topologies(folder: ServiceFolder, topology: Topology, name: str, address: str) -> Iterator[Topology]:
    """Yield the topologies to try for a rollout broker; waits for the backend broker of this life of the service.

    Raises:
        RequestTimeout: the backend broker was not announced.
    """
    life = os.environ.get(SERVICE_VARIABLE, "")
    folder.wait_for((BACKENDS,), WAIT_S, life)
    backends = replace(topology.backend_broker, endpoint=folder.backend_broker(life))
    file = str(folder.journal(name)) if topology.rollout_broker.journal else ""
    anywhere = {"front_door": f"tcp://{address}:*", "stage_events": f"tcp://{address}:*"}
    for places in (_before(folder, name, address), anywhere):
        if places:
            broker = replace(topology.rollout_broker, journal=file, **places)
            yield _with_keys(folder, replace(topology, backend_broker=backends, rollout_broker=broker))


def backend_topologies(folder: ServiceFolder, topology: Topology, address: str) -> Iterator[Topology]:
    """Yield the topologies to try for the backend broker."""
    before = _before(folder, BACKENDS, address)
    tries = [before] if before else []
    one = folder.announcement(BACKENDS)
    if not before or one is None or one.service_id != os.environ.get(SERVICE_VARIABLE, ""):
        tries.append({"endpoint": f"tcp://{address}:*"})
    for places in tries:
        yield _with_keys(folder, replace(topology, backend_broker=replace(topology.backend_broker, **places)))


def _before(folder: ServiceFolder, name: str, address: str) -> dict[str, str]:
    """Return a broker's previous endpoints, if all were at this address."""
    one = folder.announcement(name)
    if one is None or not all(place.startswith(f"tcp://{address}:") for place in one.endpoints.values()):
        return {}
    return one.endpoints


def _with_keys(folder: ServiceFolder, topology: Topology) -> Topology:
    return replace(topology, security=SecuritySettings(str(folder.keys("service"))))
