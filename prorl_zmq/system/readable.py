"""Waits for readable files. `select` cannot: it rejects descriptors above 1,023, which prorl_zmq's processes reach."""

from __future__ import annotations

import selectors
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import FileDescriptorLike


def readable(files: Iterable[FileDescriptorLike], limit_s: float | None = None) -> list[FileDescriptorLike]:
    """Return the files that can be read or have ended, once one can; an empty list after `limit_s` seconds."""
    with selectors.PollSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(limit_s)]
