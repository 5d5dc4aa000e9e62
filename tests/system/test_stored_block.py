"""Blocks read from files, copied and mapped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.system import stored_block
from prorl_zmq.system.stored_block import MAPPED_FROM_BYTES, read_block

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 3 * MAPPED_FROM_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "blocks"
    path.write_bytes(os.urandom(SIZE))
    return path


def read(path: Path, offset: int, size_bytes: int) -> bytes | memoryview:
    file = os.open(path, os.O_RDONLY)
    try:
        return read_block(file, offset, size_bytes)
    finally:
        os.close(file)


@pytest.mark.parametrize("offset", [0, 1, 4096, 5000])
@pytest.mark.parametrize("size_bytes", [0, 10, MAPPED_FROM_BYTES - 1, MAPPED_FROM_BYTES, 2 * MAPPED_FROM_BYTES + 3])
def test_part_of_a_file_is_read_at_any_place(path: Path, offset: int, size_bytes: int) -> None:
    block = read(path, offset, size_bytes)
    assert isinstance(block, memoryview) == (size_bytes >= MAPPED_FROM_BYTES)
    assert block == path.read_bytes()[offset : offset + size_bytes]


def test_block_stays_readable_when_its_file_is_removed(path: Path) -> None:
    content = path.read_bytes()
    block = read(path, 7, SIZE - 7)
    path.unlink()
    assert block == content[7:]


def test_file_that_is_too_short_gives_a_shorter_block(path: Path) -> None:
    content = path.read_bytes()
    for offset in (1, SIZE, 2 * SIZE):
        assert read(path, offset, SIZE) == content[offset:]


def test_block_is_copied_where_it_cannot_be_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_block, "_POPULATE_READ", 9999)  # an older kernel refuses this advice as it does 22
    block = read(path, 3, MAPPED_FROM_BYTES)
    assert isinstance(block, bytes)
    assert block == path.read_bytes()[3 : 3 + MAPPED_FROM_BYTES]


def test_only_some_blocks_are_mapped_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_block, "MAPPED_LIMIT", len(stored_block._MAPPINGS) + 2)
    blocks = [read(path, 0, SIZE) for _ in range(3)]
    assert [isinstance(block, memoryview) for block in blocks] == [True, True, False]
    assert blocks[2] == blocks[0]
    del blocks[0]
    assert isinstance(read(path, 0, SIZE), memoryview)
