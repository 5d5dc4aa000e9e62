"""Differences of tensors: round trips, and frames that are damaged or made to harm."""

from __future__ import annotations

import os
import zlib
from typing import Self

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.inference.weights import tensor_delta
from prorl_zmq.inference.weights.stored_tensor import StoredTensor
from prorl_zmq.inference.weights.tensor_delta import checksum, encode


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_delta, "PIECE_BYTES", 64)


def array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8).copy()


class Stored:
    """A tensor in a file in memory, with others before and after it."""

    def __init__(self, content: bytes) -> None:
        self._file = os.memfd_create("tensor")
        self._length = len(content)
        os.write(self._file, b"before" + content + b"after")
        self.tensor = StoredTensor(self._file, 6, len(content))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    @property
    def content(self) -> bytes:
        everything = os.pread(self._file, self._length + 100, 0)
        assert everything.startswith(b"before")
        assert everything.endswith(b"after")
        return everything[6:-5]


def frame(content: bytes) -> memoryview:
    return memoryview(zstandard.ZstdCompressor(level=1).compress(content))


def overwrite(positions: list[int], content: bytes) -> memoryview:
    header = np.array([len(positions), *positions], "<u4").tobytes()
    return frame(header + content)


@given(st.binary(max_size=300), st.data())
def test_a_difference_leads_there_and_back(old: bytes, data: st.DataObject) -> None:
    new = data.draw(st.one_of(st.just(old), st.binary(min_size=len(old), max_size=len(old))))
    kept = array(old)
    difference, of_new = encode(array(new), kept)
    assert kept.tobytes() == new
    assert of_new == xxhash.xxh3_128(new).hexdigest() == checksum(array(new))
    assert bool(difference) == (old != new)
    if difference:
        assert zstandard.ZstdDecompressor().decompress(difference) == (array(old) ^ array(new)).tobytes()
        with Stored(old) as stored:
            assert stored.tensor.apply_xor(memoryview(difference)) == of_new == stored.tensor.checksum()
            assert stored.content == new
            assert stored.tensor.apply_xor(memoryview(difference)) == checksum(array(old))
            assert stored.content == old


def test_overwrite_may_be_repeated() -> None:
    difference = overwrite([0, 3, 199], b"abc")
    with Stored(bytes(200)) as stored:
        for _ in range(2):
            assert stored.tensor.apply_overwrite(difference) == stored.tensor.checksum()
            assert stored.content == b"a\0\0b" + bytes(195) + b"c"
        assert stored.tensor.apply_overwrite(overwrite([], b"")) == stored.tensor.checksum()


@pytest.mark.parametrize("length", [0, 1, 64, 200])
def test_a_tensor_is_copied(length: int) -> None:
    content = np.random.default_rng(0).bytes(length)
    with Stored(content) as source, Stored(bytes(length)) as stored:
        assert stored.tensor.copy_from(source.tensor) == source.tensor.checksum() == checksum(array(content))
        assert stored.content == content


def test_a_file_that_ends_too_early() -> None:
    with Stored(bytes(200)) as stored:
        longer = StoredTensor(stored.tensor._file, 6, 206)
        with pytest.raises(ValueError, match="its file ends before it does"):
            longer.checksum()


def test_adler32_as_slime_writes_it() -> None:
    tensor = array(b"weights" * 30)
    assert checksum(tensor, "adler32") == f"{zlib.adler32(tensor):08x}"


@pytest.mark.parametrize(
    ("difference", "problem"),
    [
        (frame(bytes(199)), "shorter than the tensor"),
        (frame(bytes(201)), "longer than the tensor"),
        (frame(bytes(10**8)), "longer than the tensor"),
        (memoryview(b""), "shorter than the tensor"),
        (memoryview(b"no frame at all"), "cannot be decompressed"),
        (memoryview(bytes(frame(np.random.default_rng(0).bytes(200)))[:-9]), "shorter than the tensor|decompressed"),
    ],
)
def test_frames_that_do_not_fit(difference: memoryview, problem: str) -> None:
    with Stored(bytes(200)) as stored, pytest.raises(ValueError, match=problem):
        stored.tensor.apply_xor(difference)


@pytest.mark.parametrize(
    ("difference", "problem"),
    [
        (overwrite([200], b"a"), "position 200"),
        (overwrite([2**32 - 1], b"a"), "position 4294967295"),
        (overwrite([1, 2], b"a"), "wrong for 2 positions"),
        (overwrite([1], b"ab"), "wrong for 1 positions"),
        (frame(b"\1\0"), "wrong for"),
        (frame(b"\0" * (4 + 5 * 200 + 1)), "more than 1004 bytes"),
        (frame(bytes(10**8)), "more than 1004 bytes"),
        (memoryview(b"no frame at all"), "cannot be decompressed"),
    ],
)
def test_overwrites_that_do_not_fit_change_nothing(difference: memoryview, problem: str) -> None:
    with Stored(bytes(200)) as stored:
        with pytest.raises(ValueError, match=problem):
            stored.tensor.apply_overwrite(difference)
        assert stored.content == bytes(200)


def test_positions_that_would_overflow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_delta, "OVERWRITE_LIMIT_BYTES", 200)
    with (
        Stored(bytes(200)) as stored,
        pytest.raises(ValueError, match="positions of `overwrite` end at 200"),
    ):
        stored.tensor.apply_overwrite(overwrite([0], b"a"))
    with Stored(bytes(199)) as stored:
        stored.tensor.apply_overwrite(overwrite([0], b"a"))
        assert stored.content == b"a" + bytes(198)
