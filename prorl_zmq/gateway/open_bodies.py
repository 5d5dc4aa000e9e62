"""`OpenBodies`: limits the memory of open request bodies, per token and in total."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ..errors import Busy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BODIES_BYTES = 2**30
"""Most bytes of all of them."""
_TAKE: ContextVar[Callable[[int], None]] = ContextVar("take", default=lambda _size: None)
"""Counts bytes for the request whose handler runs."""


def take_bytes(size: int) -> None:
    """Count a part of this request's body, which has arrived.

    Raises:
        Busy: the bodies of its token's open requests would take too much memory.
    """
    _TAKE.get()(size)


class OpenBodies:
    """Bodies that have arrived, in whole or in part, of requests that are open.

    Args:
        shared: whether each token may have half of what others leave, or all of it.
    """

    def __init__(self, *, shared: bool) -> None:
        self._shares = 2 if shared else 1
        self._bytes: Counter[str] = Counter()
        """By token."""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the body of a token's request while it is open (see `take_bytes`)."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            own, total = self._bytes[name] + size, self._bytes.total()
            if self._shares * own > BODIES_BYTES - (total + size - own):
                raise Busy("the bodies of open requests take too much memory at this gateway", retry_after_s=1.0)
            self._bytes[name] = own
            taken += size

        before = _TAKE.set(take)
        try:
            yield
        finally:
            _TAKE.reset(before)
            self._bytes[name] -= taken
