"""Records beside the tokens of a trajectory: where rows lie, what is known, and forms that cannot be."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from prorl_zmq.data.records import ALIGNMENT
from prorl_zmq.data.trajectory import Role, Trajectory, block_bytes, records_at
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import EngineFailed, MalformedMessage
from prorl_zmq.wire.messages.jobs import ArrayForm, Outcome, RecordForm, Result


def experts(first: int, rows: int, dtype: type = np.uint8) -> dict[str, np.ndarray]:
    places = np.arange(first, first + rows, dtype=dtype)
    return {"experts": np.broadcast_to(places[:, None, None], (rows, 2, 3)).copy()}


def generate(builder: TrajectoryBuilder, count: int, *, own: bool = True) -> None:
    ids = np.arange(count, dtype=np.int32)
    builder.begin_turn(Role.ASSISTANT)
    if not own:
        builder.add_context(ids)
        return
    builder.add_generated(ids, -ids.astype(np.float32), np.zeros(count, np.int32))
    counts = np.arange(1, count + 1, dtype=np.int32)
    builder.add_records({"mask_counts": counts, "mask_ids": np.arange(counts.sum(), dtype=np.int32)})


def context(builder: TrajectoryBuilder, count: int) -> None:
    builder.begin_turn(Role.USER)
    builder.add_context(np.arange(count, dtype=np.int32))


def result(builder: TrajectoryBuilder) -> Result:
    return Result(
        job_id="a",
        task="t",
        outcome=Outcome.COMPLETED,
        tokens=builder.tokens,
        turns=builder.turns,
        segments=builder.segments,
        records=builder.records,
    )


def built() -> TrajectoryBuilder:
    """Two segments of 12 and 9 tokens; the experts of the first one's last four tokens are unknown."""
    builder = TrajectoryBuilder()
    context(builder, 3)
    generate(builder, 4)
    builder.add_records(experts(0, 6))
    context(builder, 2)
    generate(builder, 3)
    builder.add_records(experts(6, 2))
    builder.begin_segment()
    context(builder, 5)
    generate(builder, 4)
    builder.add_records(experts(0, 8, np.uint16))
    return builder


def test_rows_lie_at_their_tokens_behind_the_same_arrays() -> None:
    builder = built()
    block = builder.block(builder.records)
    made = Trajectory.from_frame(result(builder), block.data)
    assert block[: len(builder.block())].tobytes() == builder.block().tobytes()
    assert len(block) == block_bytes(21, 5, builder.records)
    start = block.__array_interface__["data"][0]
    for array in made.records.values():
        assert np.shares_memory(array, block)
        assert (array.__array_interface__["data"][0] - start) % ALIGNMENT == 0
    assert made.records.rows("experts").tolist() == [*range(8), *range(12, 20)]
    assert made.records["experts"][:, 1, 2].tolist() == [*range(8), *range(8)]
    assert made.records["experts"].dtype == np.uint16
    assert made.records.rows("mask_ids").tolist() == np.flatnonzero(made.loss_mask).tolist()
    assert made.records["mask_counts"].tolist() == [1, 2, 3, 4, 1, 2, 3, 1, 2, 3, 4]


def test_a_segment_has_its_own_rows() -> None:
    builder = built()
    first, second = Trajectory.from_frame(result(builder), builder.block(builder.records).data).segments()
    assert first.records.rows("experts").tolist() == [*range(8)]
    assert second.records.rows("experts").tolist() == [*range(8)]
    assert second.records.rows("sampling_mask").tolist() == np.flatnonzero(second.loss_mask).tolist()
    assert first.records["mask_ids"].tolist() == [*range(10), *range(6)]
    assert second.records["mask_ids"].tolist() == [*range(10)]
    assert len(second) == 5, "the five arrays, as without records"


def test_a_turn_of_another_line_has_routes_and_no_masks() -> None:
    builder = TrajectoryBuilder()
    context(builder, 3)
    generate(builder, 4, own=False)
    builder.add_records(experts(0, 6))
    context(builder, 1)
    generate(builder, 2)
    builder.add_records(experts(6, 3))
    made = Trajectory.from_frame(result(builder), builder.block(builder.records).data)
    assert made.records.rows("experts").tolist() == [*range(9)]
    assert made.records.rows("sampling_mask").tolist() == [8, 9]


def test_the_first_token_without_a_row_is_found() -> None:
    builder = built()
    records = Trajectory.from_frame(result(builder), builder.block(builder.records).data).records
    assert records.unknown("experts", np.arange(8)) is None
    assert records.unknown("experts", np.arange(3, 16)) == 8
    assert records.unknown("experts", np.arange(12, 20)) is None
    assert records.unknown("teacher", np.array([4, 5])) == 4
    assert records.unknown("teacher", np.zeros(0, np.int32)) is None


def test_conversations_are_joined_with_their_records() -> None:
    whole = TrajectoryBuilder()
    for _ in range(2):
        whole.append(built())
    made = Trajectory.from_frame(result(whole), whole.block(whole.records).data)
    assert made.records.rows("experts").tolist() == [*range(8), *range(12, 20), *range(21, 29), *range(33, 41)]


def test_a_joined_conversations_record_of_another_form_is_left_out() -> None:
    whole, other = built(), TrajectoryBuilder()
    context(other, 3)
    generate(other, 2)
    other.add_records({"experts": np.zeros((4, 1, 3), np.uint8)})
    whole.append(other)
    made = Trajectory.from_frame(result(whole), whole.block(whole.records).data)
    assert made.records.rows("experts").tolist() == [*range(8), *range(12, 20)]
    assert made.records.rows("sampling_mask").tolist()[-2:] == [24, 25]


@pytest.mark.parametrize(
    ("records", "said"),
    [(experts(0, 22), "more than there are tokens"), ({"experts": np.zeros((1, 1, 3), np.uint8)}, "have the shape")],
)
def test_rows_that_cannot_be_of_these_tokens_are_refused(records: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        built().add_records(records)


@pytest.mark.parametrize("shift", [1, -1, 1000])
def test_a_block_of_another_size_or_with_other_runs_is_refused(shift: int) -> None:
    builder = built()
    said = result(builder)
    block = builder.block(builder.records)
    with pytest.raises(MalformedMessage, match="take"):
        Trajectory.from_frame(said, block[:-64].data)
    at = records_at(21, 5, builder.records)
    block[at : at + 8].view(np.int32)[1] += shift
    with pytest.raises(MalformedMessage, match="the record sampling_mask has"):
        Trajectory.from_frame(said, block.data)
    other = RecordForm("experts", 0, (ArrayForm("top_ids", "int32", (0, 1)),))
    with pytest.raises(MalformedMessage, match="has the arrays top_ids"):
        Trajectory.from_frame(
            msgspec.structs.replace(said, records=(other,)), np.zeros(block_bytes(21, 5, (other,)), np.uint8).data
        )
