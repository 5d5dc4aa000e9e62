"""`PrefixIndex`: which prefixes an engine's cache has, by its KV events. Pure: no sockets, no clock.

A block of tokens is known by a key of its own, the hash of its tokens and of the key before it; the engine's hashes are
only names for these keys. Keys are of blocks of the first cache group in the GPU, without adapters and salts. A removed
block counts as gone, though the engine may have a second copy: it announces that again when a request uses it.

Batches of events have numbers from 0 on. One that is lower than the last begins a new life of the engine. After a gap,
the host asks for the lacking batches again; if they are gone, the index starts empty. So it may lack blocks that the
cache has. Until the first usable event, nothing is known.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLOCK_LIMIT = 2**20
"""Most blocks; with more, the index starts empty."""
JOB_LIMIT = 256
"""Most jobs remembered; the one without a turn for longest is forgotten."""
LACKING_S = 60.0
"""Seconds after the first turn of a full block without a usable event, after which events count as lacking."""
KEY_BYTES = 16

log = logging.getLogger("prorl.engine")

Hash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks that are in the cache now, one behind the other."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    at: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    rank: int | None = None


_decoder = msgspec.msgpack.Decoder(_Batch)


class PrefixIndex:
    """The index of one engine.

    Args:
        block_tokens: tokens of a block; events with other blocks are left out.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: dict[Hash, bytes] = {}
        """Of the engine's hashes, the keys."""
        self._resident: set[bytes] = set()
        self._learned = False
        self._jobs: OrderedDict[str, list[bytes]] = OrderedDict()
        """The keys of the full blocks of each job's first prompt; the job with the last turn is last."""
        self._turn_at: float | None = None
        """When the first turn of a full block ended."""
        self.next = self._asked = 0
        """The batch to come next, and the first that was asked for."""
        self._newest = -1
        """The newest batch that was published since the index began."""
        self._asking = True
        self._restarted = False
        """Whether a new life began while an answer was on its way, which then is of the old one."""

    # Events -----------------------------------------------------------------------------------------------------------

    def note_live(self, number: int, batch: bytes) -> bool:
        """Record a batch that was published; return whether to ask for the batches from `next` on."""
        fresh, self._newest = number > self._newest, number
        if not fresh:
            self._forget()
            self.next = 0
            self._restarted = self._asking
        if self._asking or number < self.next:
            return False  # it comes with the answer, or came with it
        if number > self.next:
            self._asking, self._asked = True, self.next
            return True
        self._apply(number, batch)
        return False

    def note_again(self, number: int, batch: bytes) -> None:
        """Record a batch that was asked for."""
        if self._restarted:
            return
        if number > self.next:
            self._forget()  # older batches are gone
        if number >= self.next:
            self._apply(number, batch)

    def end_answer(self) -> bool:
        """Record that all batches that were asked for have come; return whether to ask from `next` on."""
        self._asking = self.next <= self._newest
        if self._asking and self.next == self._asked and not self._restarted:
            self.give_up()  # none came
        self._asked, self._restarted = self.next, False
        return self._asking

    def give_up(self) -> None:
        """Start empty with the next batch that is published: there is no answer."""
        self._forget()
        self.next = self._newest + 1
        self._asking = self._restarted = False

    def _apply(self, number: int, batch: bytes) -> None:
        self.next = number + 1
        try:
            events = _decoder.decode(batch).events
            for event in events:
                if isinstance(event, AllBlocksCleared):
                    self._forget()
                elif event.medium in (None, "GPU") and not event.group_idx:
                    if isinstance(event, BlockStored):
                        self._store(event)
                    else:
                        self._remove(event)
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            log.debug("the engine's KV events %d are unusable: %s", number, error)
            self._forget()  # what they changed is unknown

    def _store(self, event: BlockStored) -> None:
        if event.block_size != self._block_tokens or event.lora_name or any(event.extra_keys or ()):
            return
        parent = b"" if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if parent is None:
            return
        keys = list(self._keys(np.array(event.token_ids, np.int32), parent))
        if len(keys) != len(event.block_hashes) or len(keys) * self._block_tokens != len(event.token_ids):
            raise ValueError(f"{len(event.block_hashes)} blocks have {len(event.token_ids)} tokens")
        if len(self._names) + len(keys) > BLOCK_LIMIT:
            self._forget()
            return
        for name, key in zip(event.block_hashes, keys, strict=True):
            self._resident.discard(self._names.get(name, b""))
            self._names[name] = key
            self._resident.add(key)
        self._learned = True

    def _remove(self, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            self._resident.discard(self._names.pop(name, b""))

    def _forget(self) -> None:
        self._names.clear()
        self._resident.clear()

    # Jobs -------------------------------------------------------------------------------------------------------------

    def note_turn(self, job_id: str, prompt: NDArray[np.int32], now: float) -> None:
        """Record a turn of the engine's own weights that has ended: prompt int32 [P]."""
        if self._turn_at is None and len(prompt) >= self._block_tokens:
            self._turn_at = now
        if job_id not in self._jobs:
            self._jobs[job_id] = list(self._keys(prompt, b""))
        self._jobs.move_to_end(job_id)
        if len(self._jobs) > JOB_LIMIT:
            self._jobs.popitem(last=False)

    def note_weights(self) -> None:
        """Record that new weights have emptied the cache: the engine publishes this with its next step only."""
        self._forget()

    def resident_jobs(self) -> tuple[str, ...]:
        """Return the jobs whose first prompts are in the cache, except for a last block that is not full."""
        if not self._resident:
            return ()
        return tuple(name for name, keys in self._jobs.items() if keys and self._resident.issuperset(keys))

    def lacks_events(self, now: float) -> bool:
        """Return whether turns have ended for `LACKING_S`, and nothing is known of the cache."""
        return not self._learned and self._turn_at is not None and self._turn_at + LACKING_S <= now

    def _keys(self, token_ids: NDArray[np.int32], key: bytes) -> Iterator[bytes]:
        """Yield the keys of full blocks behind the block with this key; empty: from the beginning on."""
        size = self._block_tokens
        for start in range(0, len(token_ids) - size + 1, size):
            key = blake2b(token_ids[start : start + size].tobytes(), key=key, digest_size=KEY_BYTES).digest()
            yield key
