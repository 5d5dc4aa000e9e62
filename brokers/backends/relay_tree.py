"""Which engine hosts feed which others with a version of weights: a binary tree below the trainer. Pure.

    trainer ── 0 ── 2, 3        A node is a place: the hosts of one copy (one machine). One of them fetches, whichever
            └─ 1 ── 4, 5        is first, and the others answer at once that they do not. A host asks all hosts of
                                the place above its own, then those of the place above that, up to the trainer.

A host that comes late asks places that already have the version, before the trainer.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from ...wire.messages.relay import SOURCES_LIMIT, WeightRelay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...wire.messages.engines import WeightUpdate
    from ...wire.messages.relay import CopyState, WeightSource

FAN_OUT = 2
HOLDERS = 4
"""Most hosts with the version that a late one asks."""


def relay_for(request: WeightUpdate, backend_id: str, copies: Mapping[str, CopyState]) -> WeightRelay | None:
    """Return the relay of a request for one host; `copies` as in `sources_of`."""
    relay = request.relay
    if relay is None:
        return None
    return WeightRelay(
        relay.index, sources_of(backend_id, copies, request.weight_version, request.digest, relay.sources)
    )


def ancestors(position: int) -> list[int]:
    """Return the positions of a place's parent, grandparent and so on in the tree; the trainer is not one of them."""
    found = []
    while position >= FAN_OUT:
        position = position // FAN_OUT - 1
        found.append(position)
    return found


def sources_of(
    backend_id: str,
    copies: Mapping[str, CopyState],
    version: int,
    weights: str,
    roots: tuple[WeightSource, ...],
) -> tuple[WeightSource, ...]:
    """Return whom a host asks for a version, the first one first: at most `SOURCES_LIMIT`, always with the trainer.

    Args:
        backend_id: the host's.
        copies: those of the model's live hosts, by backend.
        version: the version's number.
        weights: what identifies its content.
        roots: the trainer, which is asked last.
    """
    own = copies.get(backend_id)
    own_place = own.place if own is not None else None
    places: dict[str, list[CopyState]] = {}
    for one in sorted(copies):
        if copies[one].source is not None:
            places.setdefault(copies[one].place, []).append(copies[one])
    holders: list[CopyState] = []
    needing: list[list[CopyState]] = []
    position = None
    for place, hosts in places.items():
        holder = next((copy for copy in hosts if copy.version == version and copy.weights == weights), None)
        if holder is not None:
            holders.append(holder)
            continue
        if place == own_place:
            position = len(needing)
        needing.append(hosts)
    if position is None:
        position = len(needing)  # it serves no other host
    turned = position % len(holders) if holders else 0
    nearest = islice(chain(islice(holders, turned, None), islice(holders, turned)), HOLDERS + 1)
    chosen = [copy for copy in nearest if copy.place != own_place][:HOLDERS]
    above = chain.from_iterable(needing[at] for at in ancestors(position))
    sources = [copy.source for copy in (*chosen, *above) if copy.source is not None]
    return (*sources[: SOURCES_LIMIT - len(roots)], *roots)
