"""`BlockStore`: trajectory blocks that a node stores until clients have fetched them, one file per block.

    blocks/<boot>/<rollout broker>/<block id>

Writes are not synced. Files from before the machine's last boot may be torn, so the store removes them, and their jobs
run again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
from collections import defaultdict
from typing import TYPE_CHECKING

from ...system.node_name import boot_id, short_id
from ...system.stored_block import reader
from ...wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BLOCKS_LIMIT = 30_000
"""Most blocks that a node stores for one broker: one report names all of them."""
FREE_BYTES = 2**30
"""Disk space that stays free for sandboxes."""
OURS = re.compile(r"[0-9a-f]{32}")
"""Pattern of block ids; a network file system renames files that are removed while they are mapped."""
TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors for lack of descriptors or memory; the block still exists."""

log = logging.getLogger("prorl.node_broker")


class BlockStore:
    """A store that continues with the blocks that an earlier process of this boot left in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / short_id(boot_id())
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._read = reader(self._folder)
        for other in folder.iterdir():
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)
        self._sizes: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Block sizes in bytes, by broker and block id."""
        self._unnoted: dict[tuple[str, int], str] = {}
        """Block ids of events that the broker has not noted, by broker and event number."""
        for file in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):
                state = file.lstat()
                if OURS.fullmatch(file.name) and stat.S_ISREG(state.st_mode):
                    self._sizes[file.parent.name][file.name] = state.st_size

    def known(self, broker: str, number: int) -> str | None:
        """Return the id of the block of an event that was resent; None: the event is new, or is noted."""
        return self._unnoted.get((broker, number))

    def keep(self, broker: str, number: int, *parts: memoryview | bytes) -> str | None:
        """Write a block, whose parts follow each other, and return its id; None: no room, or the write failed.

        For an event number that is not noted yet, a second call returns the same id: the event was resent.
        """
        known = self.known(broker, number)
        if known is not None:
            return known
        size_bytes = sum(map(len, parts))
        if len(self._sizes[broker]) >= BLOCKS_LIMIT or not self._has_room(size_bytes):
            return None
        block_id = new_id()
        path = self._path(broker, block_id)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with path.open("xb", buffering=0) as file:
                for part in parts:
                    written = 0
                    while written < len(part):
                        written += file.write(memoryview(part)[written:])
        except OSError as error:
            log.warning("a trajectory goes to its broker, since it cannot be kept here: %s", error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        self._sizes[broker][block_id] = size_bytes
        self._unnoted[broker, number] = block_id
        return block_id

    def noted(self, broker: str, numbers: Iterable[int]) -> None:
        """Allow these events' blocks to be removed: the events are noted, or will not be resent."""
        for number in numbers:
            self._unnoted.pop((broker, number), None)

    def forget(self, broker: str, block_ids: Iterable[str]) -> None:
        """Remove blocks that a broker no longer needs, except blocks whose events the broker has not noted."""
        unnoted = set(self._unnoted.values())
        for block_id in block_ids:
            if block_id in self._sizes[broker] and block_id not in unnoted:
                del self._sizes[broker][block_id]
                self._path(broker, block_id).unlink(missing_ok=True)

    def ids(self, broker: str) -> tuple[str, ...]:
        return tuple(self._sizes[broker])

    def size(self, broker: str, block_id: str) -> int:
        """Return a stored block's size in bytes."""
        return self._sizes[broker][block_id]

    def kept(self) -> tuple[int, int]:
        """Return the number of blocks and their total size in bytes."""
        sizes = [size for blocks in self._sizes.values() for size in blocks.values()]
        return len(sizes), sum(sizes)

    def open(self, block_id: str) -> int | None:
        """Return a read-only descriptor of a block, which the caller closes; None if missing, truncated or unreadable.

        Raises:
            OSError: it cannot be opened now, such as for want of descriptors; it is not lost.
        """
        broker = next((broker for broker, sizes in self._sizes.items() if block_id in sizes), None)
        if broker is None:
            return None
        try:
            file = os.open(self._path(broker, block_id), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            log.warning("the block %s cannot be opened: %s", block_id, error)
            return None
        if os.fstat(file).st_size == self._sizes[broker][block_id]:
            return file
        os.close(file)
        return None

    def read(self, block_id: str) -> bytes | memoryview | None:
        """Return a block; None if the block is missing, truncated or unreadable.

        Raises:
            OSError: as `open`.
        """
        file = self.open(block_id)
        if file is None:
            return None
        try:
            return self._read(file, 0, os.fstat(file).st_size)
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            log.warning("the block %s cannot be read: %s", block_id, error)
            return None
        finally:
            os.close(file)

    def _has_room(self, size_bytes: int) -> bool:
        return shutil.disk_usage(self._folder).free >= FREE_BYTES + size_bytes

    def _path(self, broker: str, block_id: str) -> Path:
        return self._folder / broker / block_id
