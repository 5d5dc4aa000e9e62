"""What a host lacks, what it has asked for, and whom it asks next. Pure: no sockets, no clock.

    event                                     what follows
    the source is silent or disconnected      the next source is asked for what is lacking; this one may be asked later
    the source does not have a chunk          as above, and this source is asked for no chunk of these again
    the source gave wrong bytes               as above, and this source is never asked again
    no source is left                         `source` is None

After the last source comes the first one again. Sources that only fell silent are never used up: the caller's deadline
ends the attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    Key = tuple[str, int, int]
    """The digest of a folder's index, the number of a file, and of a chunk in it."""

CREDIT = 6
"""Most chunks that one host asks for at the same time."""


class SourceOrder:
    """The sources in the order in which they are asked, over several plans.

    Args:
        sources: their number.
    """

    def __init__(self, sources: int) -> None:
        self._count = sources
        self._at = 0
        self._liars: set[int] = set()
        self._without: set[int] = set()
        """Those that do not have what the current plan asks for."""

    @property
    def source(self) -> int | None:
        """The source to ask; None: none is left."""
        for step in range(self._count):
            at = (self._at + step) % self._count
            if at not in self._liars | self._without:
                return at
        return None

    def begin(self, without: Iterable[int] = ()) -> None:
        """Begin a plan for other chunks, which the sources `without` do not have."""
        self._without = {*without}

    def leave(self, *, lied: bool = False, lacks: bool = False) -> None:
        """Go on to the next source."""
        left = self.source
        if left is not None:
            (self._liars if lied else self._without if lacks else set()).add(left)
            self._at = left + 1


class ChunkPlan:
    """The chunks of one or more folders, which come in any order.

    Args:
        keys: the chunks, in the order in which they are asked for.
        credit: most chunks that are asked for at the same time.
    """

    def __init__(self, keys: Iterable[Key], credit: int = CREDIT) -> None:
        self._lacking = dict.fromkeys(keys)
        self._asked: set[Key] = set()
        self._credit = credit

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have come."""
        return not self._lacking

    def ask(self) -> list[Key]:
        """Return the chunks to ask the current source for now, which then count as asked for."""
        more: list[Key] = []
        if len(self._asked) < self._credit:
            for key in self._lacking:
                if len(self._asked) >= self._credit:
                    break
                if key not in self._asked:
                    self._asked.add(key)
                    more.append(key)
        return more

    def is_asked(self, key: Key) -> bool:
        """Return whether the current source was asked for a chunk that has not come."""
        return key in self._asked

    def came(self, key: Key) -> None:
        """Take a chunk as received and right."""
        self._asked.discard(key)
        del self._lacking[key]

    def left(self) -> None:
        """Forget what was asked: the source was left."""
        self._asked.clear()
