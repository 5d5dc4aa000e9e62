"""How a node divides its slots among the rollout brokers. Pure.

Each broker gets slots by the weight of its sessions, at most what it asks for while others ask for more. A broker that
uses more than its share keeps those slots until its jobs end, and starts no others meanwhile. Slots that no broker asks
for are divided evenly, so a broker's first job need not wait for the next division. The order in which brokers get
remainder slots differs from node to node.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Demand(NamedTuple):
    """A broker's demand on a node."""

    slots: int
    """How many slots its jobs could use on this node."""
    weight: float = 1.0
    """Total weight of the sessions of these jobs."""


def divide(slots: int, demands: Mapping[str, Demand], used: Mapping[str, int], node: str) -> dict[str, int]:
    """Return how many slots each broker may use; slots still in use by another broker are not assigned."""
    names = sorted(demands, key=lambda name: hashlib.blake2b(f"{node} {name}".encode()).digest())
    ideal = _ideal(slots, {name: demands[name] for name in names})
    shares = {name: int(ideal[name]) for name in names}
    order = sorted(names, key=lambda name: shares[name] - ideal[name])  # stable: ties keep the node's order
    for index in range(slots - sum(shares.values())):
        shares[order[index % len(order)]] += 1
    owed = sum(max(0, used.get(name, 0) - shares[name]) for name in names)
    while owed and (above := [name for name in names if shares[name] > used.get(name, 0)]):
        shares[max(above, key=lambda name: shares[name] - used.get(name, 0))] -= 1
        owed -= 1
    return shares


def _ideal(slots: int, demands: Mapping[str, Demand]) -> dict[str, float]:
    """Return fractional shares by weight; a broker's unrequested part goes to brokers that ask for more."""
    ideal = dict.fromkeys(demands, 0.0)
    left = float(slots)
    asking = {name: demand for name, demand in demands.items() if demand.slots}
    while asking:
        weight = sum(demand.weight for demand in asking.values())
        modest = [name for name, demand in asking.items() if demand.slots <= left * demand.weight / weight]
        if not modest:
            return ideal | {name: left * demand.weight / weight for name, demand in asking.items()}
        for name in modest:
            ideal[name] = float(asking.pop(name).slots)
        left -= sum(ideal[name] for name in modest)
    return {name: share + left / len(ideal) for name, share in ideal.items()}
