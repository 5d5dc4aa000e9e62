"""The checksum of a block with records: any change is told, wherever it is."""

from __future__ import annotations

import numpy as np
import pytest

from prorl_zmq.wire.messages.blocks import ROW_WORDS, block_checksum, is_block
from prorl_zmq.wire.messages.jobs import BlockHandle

AT = 1024
ROW = 8 * ROW_WORDS


def block() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 255, AT + 5 * ROW + 256, np.uint8)


@pytest.mark.parametrize("place", [0, AT - 1, AT, AT + ROW, AT + 5 * ROW - 1, AT + 5 * ROW, AT + 5 * ROW + 255])
def test_a_changed_byte_is_told(place: int) -> None:
    changed = block()
    changed[place] ^= 16
    assert block_checksum(changed, AT) != block_checksum(block(), AT)


@pytest.mark.parametrize(("one", "other", "size"), [(0, ROW, ROW), (0, 8, 8), (8, ROW + 16, 8), (64, 2 * ROW + 64, 8)])
def test_swapped_parts_are_told(one: int, other: int, size: int) -> None:
    changed = block()
    records = changed[AT:]
    records[one : one + size], records[other : other + size] = (
        records[other : other + size].copy(),
        records[one : one + size].copy(),
    )
    assert block_checksum(changed, AT) != block_checksum(block(), AT)


def test_what_was_cut_off_is_told_whatever_its_length() -> None:
    whole = block()
    handle = BlockHandle(
        node="n", block_id="b", checksum=block_checksum(whole, AT), endpoint="tcp://127.0.0.1:1", records_at=AT
    )
    assert is_block(whole, handle)
    for size in (0, 7, AT, AT + 9, len(whole) - 1, len(whole) - 64):
        assert not is_block(whole[:size], handle)


def test_without_records_it_is_the_crc_of_all_bytes() -> None:
    import zlib

    assert block_checksum(block()) == zlib.crc32(block())
