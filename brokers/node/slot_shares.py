"""How a node divides its slots among the rollout brokers. Pure: the node decides alone, and so never gives one twice.

Each broker gets slots by the weight of its sessions, and never more than it asks for while others ask for more. So a
broker that asks for little gets that, however much others ask for, and what it leaves goes to them. Who uses more than
its share keeps that until its jobs end, and starts no others meanwhile: the slots come to the others as they are free.
Slots not asked for are dealt out evenly, so that a broker whose first job comes need not wait for the next division.
Which broker gets the slot that does not divide differs from node to node.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Demand(NamedTuple):
    """What a broker asks for."""

    slots: int
    """How many its jobs could use on this node."""
    weight: float = 1.0
    """Of the sessions that these jobs are of, together."""


def divide(slots: int, demands: Mapping[str, Demand], used: Mapping[str, int], node: str) -> dict[str, int]:
    """Return how many slots each broker may use. No slot is given that another broker still uses."""
    names = sorted(demands, key=lambda name: hashlib.blake2b(f"{node} {name}".encode()).digest())
    ideal = _ideal(slots, {name: demands[name] for name in names})
    shares = {name: int(ideal[name]) for name in names}
    order = sorted(names, key=lambda name: shares[name] - ideal[name])  # stable: ties stay in the node's order
    for index in range(slots - sum(shares.values())):
        shares[order[index % len(order)]] += 1
    owed = sum(max(0, used.get(name, 0) - shares[name]) for name in names)
    while owed and (above := [name for name in names if shares[name] > used.get(name, 0)]):
        shares[max(above, key=lambda name: shares[name] - used.get(name, 0))] -= 1
        owed -= 1
    return shares


def _ideal(slots: int, demands: Mapping[str, Demand]) -> dict[str, float]:
    """Return the shares if slots could be divided: by weight, and what one does not ask for to those that do."""
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
