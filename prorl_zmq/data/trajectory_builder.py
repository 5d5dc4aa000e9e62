"""`TrajectoryBuilder`: a trajectory in the making, as the agent loop writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EngineFailed
from ..wire.records import EXPERTS
from .records import ARRAYS, RecordBuilder, padded
from .trajectory import TokenArrays, block_bytes, pack_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..wire.messages.jobs import RecordForm
    from .trajectory import Role

FIRST_ROOM = 1024
"""Tokens that a builder has room for at first; the room doubles when it is full."""


class TrajectoryBuilder:
    """Collects the tokens of one conversation, turn by turn, as the agent loop makes them."""

    def __init__(self) -> None:
        self._room = _arrays(FIRST_ROOM)
        """Arrays over tokens, of which the first `tokens` are written."""
        self._turns: list[list[int]] = []
        self._segments = [0]
        self._records: RecordBuilder | None = None
        self.rows_known = 0
        """The segment's first tokens whose experts are recorded."""
        self.tokens = 0
        """Tokens so far."""

    def begin_segment(self) -> None:
        """Start a new segment: what is added next is a prompt of its own."""
        if self.tokens > self._segments[-1]:
            self._segments.append(self.tokens)
            self.rows_known = 0

    def begin_turn(self, role: Role) -> None:
        """Start a new turn; what is added next belongs to it."""
        self._turns.append([self.tokens, self.tokens, int(role)])

    def add_context(self, token_ids: NDArray[np.int32]) -> None:
        """Append tokens to the turn that the policy did not generate: a prompt, a template's text, a tool's answer."""
        self._add(token_ids, False, 0.0, -1)

    def add_generated(
        self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], weight_versions: NDArray[np.int32]
    ) -> None:
        """Append tokens to the turn that the policy generated: three arrays of one length, from the engine."""
        if not len(token_ids) == len(logprobs) == len(weight_versions):
            raise ValueError("token ids, log-probs and weight versions differ in length")
        self._add(token_ids, True, logprobs, weight_versions)

    def add_records(self, records: Mapping[str, NDArray[Any]]) -> None:
        """Append the arrays of an engine's records (see `wire.records`).

        Rows of generated tokens are of the last ones added; those of experts follow the `rows_known`.

        Raises:
            EngineFailed: they have another shape than earlier ones, or more rows than the segment has tokens.
        """
        builder = self._records = self._records or RecordBuilder()
        for name, (first, *_) in ARRAYS.items():
            if first not in records:
                continue
            count, is_experts = len(records[first]), name == EXPERTS
            start = self._segments[-1] + self.rows_known if is_experts else self.tokens - count
            if start + count > self.tokens or start < self._segments[-1]:
                raise EngineFailed(f"the engine gave {count} rows of {name}, more than there are tokens")
            try:
                builder.add(name, start, records)
            except ValueError as error:
                raise EngineFailed(str(error)) from error
            self.rows_known += count if is_experts else 0

    def append(self, other: TrajectoryBuilder) -> None:
        """Append another conversation, as segments of its own."""
        arrays, start, turns = other.arrays(), self.tokens, len(self._turns)
        self.begin_segment()
        self._segments += [start + segment for segment in other.segments]
        self._turns += [[start + first, start + end, role] for first, end, role in arrays.turns.tolist()]
        if len(self._turns) > turns:
            self._add(arrays.token_ids, arrays.loss_mask, arrays.logprobs, arrays.weight_versions)
        if other._records is not None:
            self._records = self._records or RecordBuilder()
            self._records.append(other._records, start)

    def prompt(self) -> NDArray[np.int32]:
        """Return all ids of the segment so far, int32: the engine's next prompt. A view that stays valid."""
        return self._room.token_ids[self._segments[-1] : self.tokens]

    @property
    def turns(self) -> int:
        """Turns so far."""
        return len(self._turns)

    @property
    def segments(self) -> tuple[int, ...]:
        """Where each segment but the first begins."""
        return tuple(start for start in self._segments[1:] if start < self.tokens)

    @property
    def segment_tokens(self) -> int:
        """Tokens of the segment so far."""
        return self.tokens - self._segments[-1]

    @property
    def records(self) -> tuple[RecordForm, ...]:
        """The records so far."""
        return self._records.forms() if self._records is not None else ()

    def checked(self, records: Sequence[RecordForm], segments: Sequence[tuple[int, int]]) -> tuple[RecordForm, ...]:
        """Return some of the `records`, each `complete` if it has all needed rows of these segments."""
        loss_mask = self.arrays().loss_mask
        return self._records.checked(records, loss_mask, segments) if self._records is not None else ()

    def block(self, records: Sequence[RecordForm] = ()) -> NDArray[np.uint8]:
        """Return everything, with these of the `records`, in one new block, uint8 [`block_bytes(tokens, …)`]."""
        arrays = pack_block(self.arrays())
        if not records or self._records is None:
            return arrays
        block = np.zeros(block_bytes(self.tokens, self.turns, records), np.uint8)
        block[: len(arrays)] = arrays
        self._records.write(block, padded(len(arrays)), records)
        return block

    def arrays(self) -> TokenArrays:
        """Return everything so far; those over tokens are views that stay valid."""
        turns = np.array(self._turns, np.int32).reshape(-1, 3)
        room, end = self._room, self.tokens
        over_tokens = (room.token_ids[:end], room.loss_mask[:end], room.logprobs[:end], room.weight_versions[:end])
        return TokenArrays(*over_tokens, turns)

    def _add(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.bool_] | bool,
        logprobs: NDArray[np.float32] | float,
        weight_versions: NDArray[np.int32] | int,
    ) -> None:
        if not self._turns:
            raise ValueError("tokens belong to a turn; begin one first")
        end = self.tokens + len(token_ids)
        if end > len(self._room.token_ids):
            larger = _arrays(max(end, 2 * len(self._room.token_ids)))
            for new, old in zip(larger[:4], self._room[:4], strict=True):
                new[: self.tokens] = old[: self.tokens]
            self._room = larger
        for room, values in zip(self._room[:4], (token_ids, loss_mask, logprobs, weight_versions), strict=True):
            room[self.tokens : end] = values
        self.tokens = end
        self._turns[-1][1] = end


def _arrays(count: int) -> TokenArrays:
    return TokenArrays(
        np.empty(count, np.int32),
        np.empty(count, np.bool_),
        np.empty(count, np.float32),
        np.empty(count, np.int32),
        np.empty((0, 3), np.int32),
    )
