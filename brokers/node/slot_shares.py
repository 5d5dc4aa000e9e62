"""How a node divides its slots among the rollout brokers. Pure: the node decides alone, and so never gives one twice.

Each broker gets slots by its demand in all of its nodes, and never fewer than it uses here. What nobody asks for is
dealt out evenly, so that a broker whose first job comes need not wait for the next division. Which broker gets the
slot that does not divide differs from node to node.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def divide(slots: int, demand: Mapping[str, int], used: Mapping[str, int], node: str) -> dict[str, int]:
    """Return how many slots each broker gets; their sum is `slots`, or what is used where that is more."""
    names = sorted(demand, key=lambda name: hashlib.blake2b(f"{node} {name}".encode()).digest())
    wanted = sum(demand.values())
    spare = max(0, slots - wanted)
    ideal = {
        name: (demand[name] if wanted <= slots else slots * demand[name] / wanted) + spare / len(names)
        for name in names
    }
    shares = {name: max(used.get(name, 0), int(ideal[name])) for name in names}
    free = slots - sum(shares.values())
    order = sorted(names, key=lambda name: shares[name] - ideal[name])  # stable: ties stay in the node's order
    for index in range(max(0, free)):
        shares[order[index % len(order)]] += 1
    while free < 0:
        above = [name for name in names if shares[name] > used.get(name, 0)]
        if not above:
            break
        shares[max(above, key=lambda name: shares[name] - ideal[name])] -= 1
        free += 1
    return shares
