"""Records: arrays beside the tokens, such as the experts that a mixture chose (`wire.records` defines their meaning).

They lie behind the five arrays of a trajectory, in the same block. Each part begins at the next multiple of 64 bytes:

    the five arrays | for each record: runs int32 [n, 2] | its arrays

`runs` are the ranges of tokens that the record has rows of, ascending; the rows follow each other as these tokens do. A
token outside of them has no row: what the engine did for it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, get_args

import numpy as np
from msgspec.structs import replace

from ..errors import MalformedMessage
from ..wire.messages.jobs import ArrayForm, ArrayType, RecordForm
from ..wire.records import EXPERTS, RECORD_NAMES, SAMPLING_MASK, TEACHER, TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

ALIGNMENT = 64
RUN_BYTES = 8
ARRAYS: Final = {
    TOP_LOGPROBS: ("top_ids", "top_logprobs"),
    SAMPLING_MASK: ("mask_counts", "mask_ids"),
    EXPERTS: (EXPERTS,),
    TEACHER: ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
}
"""The arrays of each record, in the order of a block; the first one has a row for each known token."""
ITEM_BYTES: Final[dict[str, int]] = {dtype: np.dtype(dtype).itemsize for dtype in get_args(ArrayType)}
RAGGED: Final = {"mask_ids": "mask_counts"}
"""Arrays whose rows have different lengths, and the arrays of these lengths."""


def padded(size_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def records_bytes(forms: Iterable[RecordForm]) -> int:
    """Return the size in bytes of records behind the five arrays, a multiple of 64."""
    return sum(padded(RUN_BYTES * form.runs) + sum(map(_padded_bytes, form.arrays)) for form in forms)


def scores_problem(forms: Sequence[RecordForm], frames: Sequence[Any]) -> str:
    """Return what is wrong with the records and the frames of SCORE's end, which has some; empty if nothing is."""
    names = ", ".join(form.name for form in forms) or "no record"
    if names != TEACHER:
        return f"expected the record {TEACHER}, got {names}"
    if len(frames) != 1:
        return f"expected 1 block frame, got {len(frames)}"
    size_bytes = records_bytes(forms)
    if len(frames[0]) != size_bytes:
        return f"got {len(frames[0])} bytes; the header announces {size_bytes}"
    try:
        read_scores(frames[0], forms)
    except MalformedMessage as error:
        return error.message
    return ""


def read_scores(block: Any, forms: Sequence[RecordForm]) -> Records:
    """Return the records in a block of SCORE, which has no tokens, as views.

    Raises:
        MalformedMessage: as `read_records`.
    """
    return read_records(block, 0, forms, 2**31 - 1)


class _Part(NamedTuple):
    runs: NDArray[np.int32]
    arrays: dict[str, NDArray[Any]]


class Records(Mapping[str, "NDArray[Any]"]):
    """The records of a trajectory, or of a part of one: arrays by name, as views of the block.

    | array | dtype, shape | of each known token |
    |---|---|---|
    | `top_ids` | int32 [R, K] | the K likeliest tokens, the likeliest first; -1 where fewer could be drawn |
    | `top_logprobs` | float32 [R, K] | their log-probs; -9999.0 where fewer could be drawn |
    | `mask_counts` | int32 [R] | how many tokens top-k, top-p and min-p left |
    | `mask_ids` | int32 [sum of `mask_counts`] | these tokens, one known token's after the other |
    | `experts` | uint8 or uint16 [R, layers, k] | the experts that it was sent to as input |
    | `teacher_logprobs` | float32 [R] | its log-prob by the teacher, given the tokens before it |
    | `teacher_top_ids` | int32 [R, K] | the teacher's K likeliest tokens in its place, the likeliest first |
    | `teacher_top_logprobs` | float32 [R, K] | their log-probs |

    `rows` says which tokens these are: there are no rows for others, since nothing is known of them.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Mapping[str, _Part]) -> None:
        self._parts = parts

    @property
    def names(self) -> tuple[str, ...]:
        """The records that there are, as a job names them, without numbers."""
        return tuple(self._parts)

    def rows(self, name: str) -> NDArray[np.int32]:
        """Return the token of each row of a record, or of one of its arrays: indices, int32 [R], ascending.

        Raises:
            KeyError: there is no such record.
        """
        record = next((record for record, part in self._parts.items() if name in part.arrays), name)
        runs = self._parts[record].runs
        lengths = runs[:, 1] - runs[:, 0]
        offsets = np.repeat(runs[:, 0] - (np.cumsum(lengths) - lengths), lengths)
        return (offsets + np.arange(len(offsets))).astype(np.int32)

    def unknown(self, name: str, tokens: NDArray[Any]) -> int | None:
        """Return the first of these tokens, ascending indices, without a row of a record; None: each has one."""
        if name not in self._parts:
            return int(tokens[0]) if len(tokens) else None
        left = tokens[~np.isin(tokens, self.rows(name))]
        return int(left[0]) if len(left) else None

    def part(self, start: int, end: int) -> Records:
        """Return the records of the tokens from `start` up to `end`, as views; rows count from `start`."""
        return Records({name: _cut(part, start, end) for name, part in self._parts.items()})

    def __getitem__(self, name: str) -> NDArray[Any]:
        for part in self._parts.values():
            if name in part.arrays:
                return part.arrays[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for part in self._parts.values() for name in part.arrays)

    def __len__(self) -> int:
        return sum(len(part.arrays) for part in self._parts.values())

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self.items())
        return f"<Records {shapes or 'none'}>"


NO_RECORDS: Final = Records({})


def needed_rows(name: str, loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the tokens of a segment, or of its beginning, whose rows of a record training needs, ascending.

    Experts: all before the last generated token, as input. A teacher's scores: all but the first, unless that one was
    generated. Others: the generated tokens.
    """
    if name == TEACHER:
        return np.arange(0 if loss_mask[:1].any() else 1, len(loss_mask))
    generated = np.flatnonzero(loss_mask)
    return np.arange(generated[-1] if len(generated) else 0) if name == EXPERTS else generated


def read_records(block: Any, at: int, forms: Sequence[RecordForm], tokens: int) -> Records:
    """Return the records in a block (any buffer) of `tokens` tokens, from the byte `at` on, as views.

    Raises:
        MalformedMessage: a record's rows do not match its runs, or its runs the tokens.
    """
    parts: dict[str, _Part] = {}
    flat = np.frombuffer(block, np.uint8)
    if flat.ctypes.data % 4:
        flat = flat.copy()  # a small received frame
    for form in forms:
        runs = flat[at : at + RUN_BYTES * form.runs].view(np.int32).reshape(-1, 2)
        at += padded(RUN_BYTES * form.runs)
        arrays = {}
        for array in form.arrays:
            arrays[array.name] = flat[at : at + _bytes(array)].view(array.dtype).reshape(array.shape)
            at += _padded_bytes(array)
        part = parts[form.name] = _Part(runs, arrays)
        if problem := _problem(form.name, part, tokens):
            raise MalformedMessage(f"the record {form.name} {problem}")
    return Records(parts)


def part_of(
    records: Mapping[str, NDArray[Any]], first: int, end: int, first_row: int, end_row: int
) -> dict[str, NDArray[Any]]:
    """Return a part of an engine's records: of its generated tokens `first` to `end`, and some rows of experts."""
    cut: dict[str, NDArray[Any]] = {}
    for name, array in records.items():
        if name in RAGGED:
            ends = np.concatenate([[0], np.cumsum(records[RAGGED[name]])])
            cut[name] = array[ends[min(first, len(ends) - 1)] : ends[min(end, len(ends) - 1)]]
        else:
            cut[name] = array[first_row:end_row] if name == EXPERTS else array[first:end]
    return cut


def array_form(name: str, array: NDArray[Any]) -> ArrayForm:
    """Return how an array is announced in front of its frame."""
    return ArrayForm(name, cast("ArrayType", array.dtype.name), array.shape)


class RecordBuilder:
    """Collects the rows of a trajectory's records, in the order of the tokens."""

    def __init__(self) -> None:
        self._runs: dict[str, list[list[int]]] = {}
        self._chunks: dict[str, list[NDArray[Any]]] = {}
        """By array."""

    def add(self, name: str, start: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Append the rows of a record, of the tokens from `start` on.

        Raises:
            ValueError: they have another number of columns than earlier ones.
        """
        count = len(arrays[ARRAYS[name][0]])
        if not count:
            return
        for array in ARRAYS[name]:
            if (shape := arrays[array].shape[1:]) != (earlier := self._columns(array, shape)):
                raise ValueError(f"rows of {array} have the shape {shape}, and earlier ones {earlier}")
        for array in ARRAYS[name]:
            self._chunks.setdefault(array, []).append(arrays[array])
        runs = self._runs.setdefault(name, [])
        if runs and runs[-1][1] == start:
            runs[-1][1] += count
        else:
            runs.append([start, start + count])

    def append(self, other: RecordBuilder, start: int) -> None:
        """Append another conversation's records; its first token becomes the token `start`.

        A record with another number of columns is left out: its tokens have no rows.
        """
        for name, runs in other._runs.items():
            shapes = {array: other._chunks[array][0].shape[1:] for array in ARRAYS[name]}
            if any(self._columns(array, shape) != shape for array, shape in shapes.items()):
                continue
            self._runs.setdefault(name, []).extend([first + start, end + start] for first, end in runs)
            for array in ARRAYS[name]:
                self._chunks.setdefault(array, []).extend(other._chunks[array])

    def _columns(self, array: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an array's rows so far; `default`: there are none."""
        return self._chunks[array][0].shape[1:] if array in self._chunks else default

    def checked(
        self, forms: Iterable[RecordForm], loss_mask: NDArray[np.bool_], segments: Sequence[tuple[int, int]]
    ) -> tuple[RecordForm, ...]:
        """Return the forms, each `complete` if there are all needed rows of these segments of the trajectory."""
        runs = Records({name: _Part(np.array(runs, np.int32), {}) for name, runs in self._runs.items()})

        def is_complete(name: str) -> bool:
            needed = (start + needed_rows(name, loss_mask[start:end]) for start, end in segments)
            return all(runs.unknown(name, tokens) is None for tokens in needed)

        return tuple(replace(form, complete=is_complete(form.name)) for form in forms)

    def forms(self) -> tuple[RecordForm, ...]:
        return tuple(
            RecordForm(name, len(self._runs[name]), tuple(map(self._form, ARRAYS[name])))
            for name in (*RECORD_NAMES, TEACHER)
            if name in self._runs
        )

    def write(self, flat: NDArray[np.uint8], at: int, forms: Iterable[RecordForm]) -> None:
        """Write the records of these forms into a block, from the byte `at` on."""
        for form in forms:
            runs = np.array(self._runs[form.name], np.int32)
            at = _write(flat, at, runs)
            for array in form.arrays:
                view = flat[at : at + _bytes(array)].view(array.dtype).reshape(array.shape)
                np.concatenate(self._chunks[array.name], out=view)
                at += _padded_bytes(array)

    def _form(self, name: str) -> ArrayForm:
        chunks = self._chunks[name]
        shape = (sum(map(len, chunks)), *chunks[0].shape[1:])
        return ArrayForm(name, np.result_type(*{chunk.dtype for chunk in chunks}).name, shape)  # type: ignore[arg-type]


def with_record(block: Any, record: Any) -> memoryview:
    """Return a copy of a trajectory's block (any buffer) with a further record, as `RecordBuilder.write` lays it."""
    flat = np.frombuffer(block, np.uint8)
    at = padded(len(flat))
    joined = np.empty(at + len(record), np.uint8)
    joined[: len(flat)] = flat
    joined[len(flat) : at] = 0
    joined[at:] = np.frombuffer(record, np.uint8)
    return joined.data


def _write(flat: NDArray[np.uint8], at: int, array: NDArray[Any]) -> int:
    flat[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
    return at + padded(array.nbytes)


def _cut(part: _Part, start: int, end: int) -> _Part:
    runs = part.runs
    first, last = (int(np.diff(np.minimum(runs, edge), axis=1).sum()) for edge in (start, end))
    inside = np.clip(runs, start, end) - np.int32(start)
    cut = part_of(part.arrays, first, last, first, last)
    return _Part(inside[inside[:, 1] > inside[:, 0]], cut)


def _problem(name: str, part: _Part, tokens: int) -> str:
    """Return what is wrong with a record; empty if nothing is."""
    flat = part.runs.reshape(-1)
    if tuple(part.arrays) != ARRAYS[name]:
        return f"has the arrays {', '.join(part.arrays)}"
    if len(flat) and (flat[0] < 0 or flat[-1] > tokens or bool(np.any(np.diff(flat) < 0))):
        return f"has rows of tokens beyond {tokens}, or in another order"
    rows = int((part.runs[:, 1] - part.runs[:, 0]).sum())
    for array_name, array in part.arrays.items():
        expected = int(part.arrays[RAGGED[array_name]].sum()) if array_name in RAGGED else rows
        if len(array) != expected:
            return f"has {len(array)} rows of {array_name}, not {expected}"
    return ""


def _bytes(array: ArrayForm) -> int:
    return ITEM_BYTES[array.dtype] * prod(array.shape)


def _padded_bytes(array: ArrayForm) -> int:
    return padded(_bytes(array))
