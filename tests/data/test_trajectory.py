from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.data.trajectory import TOKEN_BYTES, TURN_BYTES, Role, Trajectory, array_views, block_bytes
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import ErrorInfo, MalformedMessage
from prorl_zmq.wire.messages.jobs import Outcome, Result


def built() -> TrajectoryBuilder:
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.USER)
    builder.add_context(np.array([1, 2, 3], np.int32))
    builder.begin_turn(Role.ASSISTANT)
    builder.add_context(np.array([4], np.int32))
    builder.add_generated(np.array([5, 6], np.int32), np.array([-0.5, -0.25], np.float32), np.array([7, 8], np.int32))
    return builder


def result(tokens: int, turns: int) -> Result:
    return Result(
        job_id="a", task="math", group_id="g", outcome=Outcome.COMPLETED, reward=0.5, tokens=tokens, turns=turns
    )


def test_a_trajectory_reads_as_it_was_built() -> None:
    builder = built()
    assert (builder.tokens, builder.turns) == (6, 2)
    assert builder.prompt().tolist() == [1, 2, 3, 4, 5, 6]
    trajectory = Trajectory.from_frame(result(6, 2), builder.block())
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert trajectory.loss_mask.tolist() == [False, False, False, False, True, True]
    assert trajectory.logprobs.tolist() == [0, 0, 0, 0, -0.5, -0.25]
    assert trajectory.weight_versions.tolist() == [-1, -1, -1, -1, 7, 8]
    assert trajectory.turns.tolist() == [[0, 3, Role.USER], [3, 6, Role.ASSISTANT]]
    dtypes = {name: getattr(trajectory, name).dtype for name in ("token_ids", "loss_mask", "logprobs", "turns")}
    assert dtypes == {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "turns": np.int32}


def test_a_trajectory_knows_what_became_of_its_job() -> None:
    trajectory = Trajectory.from_frame(result(0, 0), b"")
    assert (trajectory.job_id, trajectory.group_id, trajectory.reward) == ("a", "g", 0.5)
    assert (trajectory.outcome, trajectory.error) == ("completed", None)
    failed = Result(job_id="a", task="math", outcome=Outcome.FAILED, error=ErrorInfo("handler_failed", "it raised"))
    assert Trajectory.from_frame(failed, b"").error == ErrorInfo("handler_failed", "it raised")


def test_a_job_without_tokens_has_arrays_of_length_zero() -> None:
    arrays = array_views(b"", 0, 0)
    assert [array.shape for array in arrays] == [(0,), (0,), (0,), (0,), (0, 3)]
    assert TrajectoryBuilder().block().size == 0
    assert TrajectoryBuilder().prompt().dtype == np.int32


@pytest.mark.parametrize("tokens", [1, 7, 40_000])
def test_the_arrays_lie_in_the_block(tokens: int) -> None:
    block = np.zeros(block_bytes(tokens, 3), np.uint8)
    arrays = array_views(block.data, tokens, 3)
    start = block.__array_interface__["data"][0]
    offsets = {name: array.__array_interface__["data"][0] - start for name, array in arrays._asdict().items()}
    assert offsets == {
        "token_ids": 0,
        "logprobs": 4 * tokens,
        "weight_versions": 8 * tokens,
        "turns": 12 * tokens,
        "loss_mask": 12 * tokens + 3 * TURN_BYTES,
    }
    for array in arrays:
        assert np.shares_memory(array, block)
        assert array.flags.aligned
    assert sum(array.nbytes for array in arrays) == block.nbytes


def test_what_came_off_a_socket_cannot_be_written_to() -> None:
    trajectory = Trajectory.from_frame(result(6, 2), built().block().tobytes())
    with pytest.raises(ValueError, match="read-only"):
        trajectory.token_ids[0] = 9


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_an_unaligned_block_is_copied_and_not_handed_out(shift: int) -> None:
    block = built().block()
    memory = np.zeros(block.size + 8, np.uint8)
    shifted = memory[shift : shift + block.size]
    shifted[:] = block
    arrays = array_views(shifted.data, 6, 2)
    assert arrays.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    for array in arrays:
        assert array.flags.aligned
        assert not np.shares_memory(array, memory)


@pytest.mark.parametrize(("tokens", "turns"), [(5, 2), (7, 2), (6, 1), (6, 3), (0, 0), (2**31 - 1, 0)])
def test_a_block_of_another_size_is_malformed(tokens: int, turns: int) -> None:
    with pytest.raises(MalformedMessage, match=f"{tokens} tokens in {turns} turns take"):
        Trajectory.from_frame(result(tokens, turns), built().block())


def test_arrays_of_different_lengths_are_refused() -> None:
    builder = built()
    with pytest.raises(ValueError, match="differ in length"):
        builder.add_generated(np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32))
    assert builder.tokens == 6


def test_tokens_belong_to_a_turn() -> None:
    with pytest.raises(ValueError, match="begin one first"):
        TrajectoryBuilder().add_context(np.zeros(1, np.int32))


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
GENERATED = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e6, 0, width=32), st.integers(0, 2**31 - 1)), max_size=5
)
TURNS = st.lists(
    st.tuples(
        st.sampled_from(Role),
        st.lists(
            st.one_of(IDS.map(lambda ids: ("context", ids)), GENERATED.map(lambda g: ("generated", g))), max_size=3
        ),
    ),
    max_size=5,
)


@given(TURNS)
def test_every_conversation_reads_as_it_was_built(conversation: list[tuple[Role, list[tuple[str, list[Any]]]]]) -> None:
    builder = TrajectoryBuilder()
    tokens: list[tuple[int, bool, float, int]] = []
    turns: list[list[int]] = []
    for role, parts in conversation:
        builder.begin_turn(role)
        start = len(tokens)
        for kind, part in parts:
            if kind == "context":
                builder.add_context(np.array(part, np.int32))
                tokens += [(token, False, 0.0, -1) for token in part]
            else:
                ids, logprobs, versions = zip(*part, strict=True) if part else ((), (), ())
                builder.add_generated(
                    np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32)
                )
                tokens += [(token, True, logprob, version) for token, logprob, version in part]
        turns.append([start, len(tokens), role])
    assert builder.prompt().tolist() == [token for token, *_ in tokens]
    block = builder.block()
    assert block.size == len(tokens) * TOKEN_BYTES + len(turns) * TURN_BYTES
    arrays = array_views(block.tobytes(), builder.tokens, builder.turns)
    read = zip(*(array.tolist() for array in arrays[:4]), strict=True)
    assert list(read) == tokens
    assert arrays.turns.tolist() == turns
