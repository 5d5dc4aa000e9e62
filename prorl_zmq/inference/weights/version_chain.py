"""Which versions of weights lead where: full versions (anchors) and deltas between them, by their bytes. Pure.

A chain costs bytes, not versions: a host that comes late reads an anchor and all deltas after it, a host that has a
version only the deltas after that. Three questions are answered by bytes:

    is an anchor due?         if the deltas since the last one would be half of a full version, or are very many
    how to reach a version?   from the copy, or from an anchor, whichever reads less
    what may be deleted?      what no host reads on its way to the wanted version or a later one
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ANCHOR_SHARE = 0.5
"""A host that comes late reads at most this much more than a full version."""
CHAIN_LIMIT = 256
"""Most deltas after an anchor: each takes a few files, however small they are."""


class Version(NamedTuple):
    """What is published of a version: an anchor, a delta, or both."""

    version: int
    weights: str = ""
    """Identifies its content; empty: not known."""
    full_bytes: int | None = None
    """Of the anchor; None: there is none."""
    base: int | None = None
    """The version before the delta; None: there is no delta."""
    base_weights: str = ""
    delta_bytes: int = 0


class Content(NamedTuple):
    """A version with what identifies its content: a number may be used again by a trainer that went back."""

    version: int
    weights: str = ""
    """Empty: not known."""

    def may_be(self, other: Content) -> bool:
        """Return whether both are the same, as far as is known."""
        return self.version == other.version and _agree(self.weights, other.weights)


class Route(NamedTuple):
    """How a host reaches a version."""

    anchor: int | None
    """The full version to begin with; None: the host begins with what it has."""
    deltas: tuple[int, ...]
    """The versions whose deltas it applies, in this order."""
    back: bool
    """It undoes the one delta instead: the last one of what it has."""
    size_bytes: int
    """What it reads."""


def is_anchor_due(delta_bytes: int, chain_bytes: int, chain_length: int, full_bytes: int) -> bool:
    """Return whether a version must be full.

    Args:
        delta_bytes: of this version.
        chain_bytes: of the deltas between the last anchor and this version.
        chain_length: how many these are.
        full_bytes: of a full version.
    """
    return chain_bytes + delta_bytes > ANCHOR_SHARE * full_bytes or chain_length >= CHAIN_LIMIT


def find_route(look: Callable[[int], Version | None], had: Content | None, wanted: Content) -> Route | None:
    """Return how to reach a version with the fewest bytes; None: it cannot be reached.

    Args:
        look: returns what is published of a version; called for the wanted one and back, while that can pay.
        had: what the host has, if it has a whole version.
        wanted: what it shall have.
    """
    best: Route | None = None
    if had is not None and had.version > wanted.version and (last := look(had.version)) is not None:
        is_last = _agree(last.weights, had.weights)
        if is_last and last.base == wanted.version and _agree(last.base_weights, wanted.weights):
            best = Route(None, (had.version,), True, last.delta_bytes)
    deltas: tuple[int, ...] = ()
    (at, weights), read_bytes = wanted, 0
    while best is None or read_bytes < best.size_bytes:
        if had is not None and had.may_be(Content(at, weights)):
            return Route(None, deltas, False, read_bytes)
        found = look(at)
        if found is None or not _agree(found.weights, weights):
            break
        if found.full_bytes is not None and (best is None or read_bytes + found.full_bytes < best.size_bytes):
            best = Route(at, deltas, False, read_bytes + found.full_bytes)
        if found.base is None or found.base >= at:
            break
        deltas = (at, *deltas)
        read_bytes += found.delta_bytes
        at, weights = found.base, found.base_weights
    return best


def needed_versions(published: Iterable[Version], wanted: int, had: Iterable[Content]) -> set[int]:
    """Return the versions that must stay, of those that are published.

    These are the newest version, the wanted one, and what a new host and each live host read to reach either. Versions
    of an earlier run of the trainer that are on no such way may go, even if their numbers are higher.

    Args:
        published: all of them, the newest one being the last of these.
        wanted: the version that engines should serve, so the oldest that one may still ask for.
        had: what live hosts have.
    """
    by_version = {one.version: one for one in published}
    if not by_version:
        return set()
    newest = list(by_version)[-1]
    ends = {newest, wanted} & by_version.keys()
    stay = set(ends)
    for end in ends:
        for start in (None, *had):
            route = find_route(by_version.get, start, Content(end, by_version[end].weights))
            if route is not None:
                stay |= {*route.deltas} | ({route.anchor} if route.anchor is not None else set())
    return stay


def _agree(weights: str, others: str) -> bool:
    return not weights or not others or weights == others
