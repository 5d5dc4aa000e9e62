"""Which engine hosts feed which others with a version of weights: a binary tree below the trainer. Pure.

    trainer ── 0 ── 2, 3        Hosts of one copy (one machine) count as one: the first of them fetches, the others
            └─ 1 ── 4, 5        find the copy done. A host asks its parent, then that one's parent, up to the trainer.

A host that comes late asks those that already have the version, before the trainer.
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
    sources = sources_of(backend_id, copies, request.weight_version, request.digest, relay.sources)
    return WeightRelay(relay.index, sources[-SOURCES_LIMIT:])


def ancestors(position: int) -> list[int]:
    """Return the positions of a host's parent, grandparent and so on in the tree; the trainer is not one of them."""
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
    """Return whom a host asks for a version, the first one first.

    Args:
        backend_id: the host's.
        copies: those of the model's live hosts, by backend.
        version: the version's number.
        weights: what identifies its content.
        roots: the trainer, which is asked last.
    """
    own = copies.get(backend_id)
    serving: dict[str, CopyState] = {}
    for one in sorted(copies):
        if copies[one].source is not None:
            serving.setdefault(copies[one].place, copies[one])
    holders: list[CopyState] = []
    needing: list[CopyState] = []
    for copy in serving.values():
        (holders if copy.version == version and copy.weights == weights else needing).append(copy)
    position = len(needing)  # it serves no other host
    if own is not None:
        position = next((at for at, copy in enumerate(needing) if copy.place == own.place), position)
    turned = position % len(holders) if holders else 0
    nearest = islice(chain(islice(holders, turned, None), islice(holders, turned)), HOLDERS + 1)
    chosen = [copy for copy in nearest if own is None or copy.place != own.place]
    above = [needing[at] for at in ancestors(position)]
    hosts = [one.source for one in (*chosen[:HOLDERS], *above) if one.source is not None]
    return (*hosts, *roots)
