"""Rewards by conversation and by turn: each role is a group of its own, and each token has what it earned."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from documents import blocks
from finished_groups import Talk, Turn, chat, group, played, rewritten, trajectory
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq import Group, Trajectory, collate
from prorl_zmq.data.rows import rows_of
from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import MalformedMessage, NotTrainable
from prorl_zmq.integrations.session import Sample
from prorl_zmq.trackers.conversation import sample_conversations
from prorl_zmq.wire.messages.jobs import ConversationPart


def said(*tokens: int, reward: float | None = None, **more: Any) -> Turn:
    """Give a turn of the policy, after one token of the template."""
    return Turn(Role.ASSISTANT, [9], [(token, -0.5, 3) for token in tokens], reward=reward, **more)


def asked(*tokens: int, **more: Any) -> Turn:
    return Turn(Role.USER, tokens, **more)


WHITE = Talk("white", [asked(1, 2), said(10, 11, reward=0.25), asked(3), said(12, reward=-1.0)], 1.0, "environment")
USER = Talk("user", [asked(4), asked(5, 6)], trained=False)
BLACK = Talk("black", [asked(1), said(20), asked(7, begins_segment=True), said(21, 22, reward=0.5)])


def game(**result: Any) -> Trajectory:
    return played([WHITE, USER, BLACK], -3.0, job_id="game", group_id="g", stop_reason="max_turns", **result)


def test_a_rollout_is_split_by_its_trained_conversations() -> None:
    whole = game()
    white, black = whole.split()
    assert (white.group_id, white.reward, white.result.stop_reason) == ("g/white", 1.0, "environment")
    assert (black.group_id, black.reward, black.result.stop_reason) == ("g/black", -3.0, "max_turns")
    assert (white.job_id, black.job_id) == ("game", "game")
    assert white.token_ids.tolist() == [1, 2, 9, 10, 11, 3, 9, 12]
    assert black.token_ids.tolist() == [1, 9, 20, 7, 9, 21, 22]
    assert white.turns.tolist() == [[0, 2, 1], [2, 5, 2], [5, 6, 1], [6, 8, 2]]
    assert black.turns.tolist() == [[0, 1, 1], [1, 3, 2], [3, 4, 1], [4, 7, 2]]
    assert (white.result.segments, black.result.segments) == ((), (3,))
    assert (white.result.turn_rewards, black.result.turn_rewards) == (((1, 0.25), (3, -1.0)), ((3, 0.5),))
    for part in (white, black):
        assert (part.result.tokens, part.result.turns) == (len(part.token_ids), len(part.turns))
        assert np.shares_memory(part.logprobs, whole.logprobs)
        assert Trajectory.from_frame(part.result, _block(part)).result == part.result
        assert part.split() == [part]


def _block(part: Trajectory) -> bytes:
    arrays = (part.token_ids, part.logprobs, part.weight_versions, part.turns, part.loss_mask)
    return b"".join(array.tobytes() for array in arrays)


def test_each_row_has_its_conversations_reward_by_token() -> None:
    white, first, second = rows_of(group("g", game()).split())
    assert (white.group_id, first.group_id, second.group_id) == ("g/white", "g/black", "g/black")
    assert white.token_rewards.tolist() == [0, 0, 0, 0, 0.25, 0, 0, 0.75]
    assert first.token_rewards.tolist() == [0, 0, -3.0]
    assert second.token_rewards.tolist() == [0, 0, 0, -3.0]
    assert [row.reward for row in (white, first, second)] == [1.0, -3.0, -3.0]
    assert [row.truncated for row in (white, first, second)] == [False, True, True]


def test_a_response_that_is_cut_keeps_the_whole_reward() -> None:
    (row,) = rows_of([group("g", trajectory([asked(1), said(10, 11, reward=0.5), asked(2), said(12)], 2.0))])
    assert Sample.of(row).token_rewards.tolist() == [0, 0.5, 0, 0, 1.5]
    assert Sample.of(row, 4, "truncate").token_rewards.tolist() == [0, 2.0, 0, 0]
    assert Sample.of(row, 1, "truncate").token_rewards.tolist() == [2.0]
    assert Sample.of(row, 1).token_rewards.tolist() == []


def test_a_rollout_without_names_is_not_split() -> None:
    one, two = chat([1], [2]), rewritten()
    assert one.split() == [one]
    batch = group("g", one, two)
    assert batch.split() == [batch]


def test_one_trained_conversation_beside_a_simulated_user_needs_no_split() -> None:
    (row,) = rows_of([group("g", played([USER, WHITE], 0.0))])
    assert (row.reward, row.trajectory.result.stop_reason, row.group_id) == (1.0, "environment", "g")
    assert row.arrays.token_ids.tolist() == [1, 2, 9, 10, 11, 3, 9, 12]


def test_several_trained_conversations_are_refused_by_name_until_they_are_split() -> None:
    with pytest.raises(NotTrainable, match=r"^job game has the trained conversations white, black; split its group"):
        collate([group("g", game())])


@pytest.mark.parametrize("talks", [[USER], [Talk("white", [asked(1)]), Talk("black", [])]])
def test_a_rollout_in_which_nobody_trained_spoke_is_refused(talks: list[Talk]) -> None:
    silent = played(talks)
    assert silent.split() == []
    with pytest.raises(NotTrainable, match="no token that the policy generated"):
        collate([group("g", silent)])


def test_a_player_who_never_spoke_is_in_no_group() -> None:
    one = played([WHITE, Talk("black", [asked(1)])])
    assert [(role.group_id, len(role)) for role in group("g", game(), one).split()] == [("g/white", 2), ("g/black", 1)]


def test_a_reward_on_a_turn_without_generated_tokens_is_refused_by_name() -> None:
    wrong = trajectory([asked(1, reward=0.5), said(2)], job_id="bad")
    with pytest.raises(NotTrainable, match=r"^job bad has the reward 0\.5 on turn 0, in which nothing was generated"):
        rows_of([group("g", chat([1], [2]), wrong)])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"conversations": (ConversationPart("white", 0, 2),)}, "job game: the conversations have 2 segments"),
        ({"turn_rewards": ((11, 0.5),)}, "job game: rewards of the turns"),
    ],
)
def test_a_result_whose_parts_do_not_fit_is_malformed(fields: dict[str, Any], problem: str) -> None:
    one = game()
    with pytest.raises(MalformedMessage, match=problem):
        Trajectory.from_frame(msgspec.structs.replace(one.result, **fields), _block(one))


def test_people_see_who_spoke_and_what_each_turn_earned() -> None:
    one = game()
    heads = [line for line in one.text().splitlines() if line.startswith("[")]
    earned = ["", " · reward 0.25", "", " · reward -1"]
    spoke = ["user", "assistant", "user", "assistant"]
    assert heads[:4] == [f"[{role} · white{own}]" for role, own in zip(spoke, earned, strict=True)]
    assert heads[4:7] == ["[user · user]", "[user · user]", "[user · black]"]
    assert heads[-1] == "[assistant · black · reward 0.5]"
    assert "assistant · black · reward 0.5" in one._repr_html_()
    assert "[assistant · reward 2]" in trajectory([asked(1), said(2, reward=2.0)]).text()
    rows = sample_conversations([one], lambda ids: " ".join(map(str, ids)))
    assert "[assistant · white · reward 0.25]\n9 10 11" in rows[0].text


def advantages_of_the_page() -> Any:
    """Return `advantages` of docs/batches.md."""
    (block,) = [block for block in blocks("python") if "def advantages(" in block]
    defined: dict[str, Any] = {"collate": collate}
    exec(block, defined)
    return defined["advantages"]


ADVANTAGES = advantages_of_the_page()
REWARD = st.floats(-1e3, 1e3, width=32)
SPEECH = st.builds(
    lambda count, reward, begins: said(*range(10, 10 + count), reward=reward, begins_segment=begins),
    st.integers(1, 3),
    st.none() | REWARD,
    st.booleans(),
)
ANSWER = st.builds(asked, st.integers(1, 9))


@st.composite
def games(draw: st.DrawFn) -> tuple[Group, dict[str, list[float]]]:
    """Give a group of games of two or three players, beside a simulated user; and each player's rewards."""
    players = draw(st.lists(st.sampled_from("abcd"), min_size=2, max_size=3, unique=True))
    rewards: dict[str, list[float]] = {player: [] for player in players}
    members = []
    for _ in range(draw(st.integers(1, 4))):
        talks = [Talk("user", [asked(1)], trained=False)] if draw(st.booleans()) else []
        for player in draw(st.permutations(players)):
            rewards[player].append(draw(REWARD))
            turns = draw(st.lists(st.tuples(ANSWER, SPEECH), min_size=1, max_size=3))
            talks.append(Talk(player, [turn for pair in turns for turn in pair], rewards[player][-1]))
        members.append(played(talks, 0.0))
    return group("g", *members), rewards


@given(games())
def test_the_baseline_of_a_player_is_that_players_mean(case: tuple[Group, dict[str, list[float]]]) -> None:
    """As a trainer computes it: over the rows of `collate` that are the last of a trajectory, by group."""
    whole, rewards = case
    roles = whole.split()
    arrays = collate(roles)
    of_page = ADVANTAGES([whole])
    assert {role.group_id for role in roles} == {f"g/{player}" for player in rewards}
    for index, role in enumerate(roles):
        earned = rewards[role.group_id.removeprefix("g/")]
        ours = arrays["rewards"][(arrays["group"] == index) & arrays["is_last"]]
        assert ours.tolist() == earned  # by place: each advantage is of the player's own game
        assert role.rewards.tolist() == earned
        assert [member.job_id for member in role.trajectories] == [member.job_id for member in whole.trajectories]
        assert of_page[1][of_page[0]["group"] == index].tolist() == pytest.approx(
            [ours_of - np.mean(earned) for ours_of in arrays["rewards"][arrays["group"] == index]], abs=1e-3
        )


@given(games())
def test_every_token_is_its_players_and_every_rows_rewards_sum_to_its_reward(
    case: tuple[Group, dict[str, list[float]]],
) -> None:
    whole, _ = case
    for row in rows_of(whole.split()):
        scale = 1 + float(np.abs(row.token_rewards).sum())
        assert float(row.token_rewards.sum(dtype=np.float64)) == pytest.approx(row.reward, abs=1e-6 * scale)
        assert not row.token_rewards[~row.arrays.loss_mask].any()
    for place, member in enumerate(whole.trajectories):
        parts = [role.trajectories[place] for role in whole.split()]
        assert sum(part.generated_tokens for part in parts) == member.generated_tokens
        placed = [(part.job_id, reward) for part in parts for _, reward in part.reward_places()]
        assert sorted(placed) == sorted((member.job_id, reward) for _, reward in member.reward_places())
        for part in parts:
            for where, _ in part.reward_places():
                assert part.loss_mask[where]
