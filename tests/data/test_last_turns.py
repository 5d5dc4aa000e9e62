"""The last turns of a rollout that has not ended."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.data.last_turns import turns_so_far
from prorl_zmq.data.trajectory import Role, TokenArrays, array_views
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.wire.messages.jobs import Step
from prorl_zmq.wire.messages.watching import TOKENS_LIMIT, TURNS_LIMIT

STEPS = (Step("engine", 1, 0.0, 1.0),)


def rollout(sizes: list[int]) -> TokenArrays:
    """Turns of so many tokens, the user's and the policy's in turn; the ids count the tokens."""
    builder = TrajectoryBuilder()
    for number, size in enumerate(sizes):
        ids = np.arange(builder.tokens, builder.tokens + size, dtype=np.int32)
        if number % 2:
            builder.begin_turn(Role.ASSISTANT)
            builder.add_generated(ids, -ids.astype(np.float32), ids)
        else:
            builder.begin_turn(Role.USER)
            builder.add_context(ids)
    return builder.arrays()


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, TOKENS_LIMIT + 9)), min_size=1, max_size=50))
def test_as_many_of_the_last_tokens_are_shown_as_the_limits_allow(sizes: list[int]) -> None:
    arrays = rollout(sizes)
    total = sum(sizes)
    so_far, block = turns_so_far(arrays, "engine-0", STEPS, 0)
    assert (so_far.turns, so_far.tokens, so_far.backend) == (len(sizes), total, "engine-0")
    if block is None:
        assert (total, so_far.shown_turns, so_far.shown_tokens) == (0, 0, 0)
        return
    shown = array_views(block, so_far.shown_tokens, so_far.shown_turns)
    assert shown.token_ids.tolist() == list(range(total - so_far.shown_tokens, total))
    whole = sum(sizes[-TURNS_LIMIT:])
    assert so_far.shown_tokens == min(whole, TOKENS_LIMIT)
    first = len(sizes) - so_far.shown_turns
    assert so_far.shown_turns <= TURNS_LIMIT
    assert so_far.policy_turns_before == first // 2
    lengths = (shown.turns[:, 1] - shown.turns[:, 0]).tolist()
    assert lengths == [sizes[first] - so_far.cut_tokens, *sizes[first + 1 :]]
    roles = [Role.ASSISTANT if number % 2 else Role.USER for number in range(first, len(sizes))]
    assert shown.turns[:, 2].tolist() == roles
    own = shown.loss_mask
    assert shown.logprobs[own].tolist() == (-shown.token_ids[own]).tolist()
    assert so_far.steps == STEPS


def test_who_knows_all_is_sent_nothing() -> None:
    arrays = rollout([3, 2])
    so_far, block = turns_so_far(arrays, "", STEPS, 5)
    assert (so_far.tokens, so_far.shown_tokens, so_far.steps, block) == (5, 0, (), None)
    assert turns_so_far(arrays, "", STEPS, 3)[1] is not None
