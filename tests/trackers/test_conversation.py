"""Sample conversations: hostile and huge ones become a few rows of clean text."""

from __future__ import annotations

import unicodedata

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.system.logs import keep_secret
from prorl_zmq.trackers import sample_conversations
from prorl_zmq.trackers.conversation import (
    ROWS,
    TABLE_BYTES,
    TEXT_CHARACTERS,
    TURN_TOKENS,
    TURNS,
    Conversation,
    conversation,
    fitting,
    spread,
)
from prorl_zmq.wire.messages.jobs import Outcome, Result

HOSTILE = "<script>alert(1)</script>\x1b]0;owned\x07 \u202eback\u2029 ``` </pre>\n    indented\r\n\x00end"
NOTED = 60
"""Room for the words about what was left out, and about a row's roles."""


def trajectory(job_id: str, reward: float | None, tokens: int = 6) -> Trajectory:
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.USER)
    builder.add_context(np.arange(tokens, dtype=np.int32))
    builder.begin_turn(Role.ASSISTANT)
    builder.add_generated(np.full(2, 7, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
    outcome = Outcome.COMPLETED if reward is not None else Outcome.TIMEOUT
    result = Result(job_id=job_id, task="t", outcome=outcome, reward=reward, tokens=tokens + 2, turns=2)
    return Trajectory.from_frame(result, builder.block())


def words(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def test_a_row_has_the_turns_with_their_roles() -> None:
    (row,) = sample_conversations([trajectory("a", 1.0)], words)
    assert row == Conversation("a", "t", "completed", 1.0, 8, "[user]\n0 1 2 3 4 5\n\n[assistant]\n7 7")


def test_an_error_is_the_last_of_a_row() -> None:
    error = ErrorInfo("timeout", "too \x1b[31mlate")
    result = Result(job_id="a", task="t", outcome=Outcome.TIMEOUT, error=error)
    assert conversation(result, []).text == "\n\n[timeout]\ntoo \\x1b[31mlate"


def test_rows_go_from_the_worst_to_the_best() -> None:
    rewards = [0.1 * number for number in range(50)]
    given_rewards = [None, *rewards[::-1]]
    rows = sample_conversations([trajectory(f"j{n}", reward) for n, reward in enumerate(given_rewards)], words)
    got = [row.reward for row in rows]
    assert len(got) == ROWS
    assert got[0] is None
    assert got[-1] == rewards[-1]
    assert got[1:] == sorted(reward for reward in got if reward is not None)
    assert len(sample_conversations([trajectory("a", 1.0)] * 20, words, rows=100)) == ROWS


def test_few_tokens_of_a_huge_turn_are_decoded() -> None:
    decoded = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return words(ids)

    (row,) = sample_conversations([trajectory("a", 1.0, tokens=300_000)], decode)
    assert decoded == [TURN_TOKENS, 2]
    assert len(row.text) <= TEXT_CHARACTERS + NOTED
    assert row.text.startswith("[user]\n0 1 2")
    assert "299999\n\n[assistant]\n7 7" in row.text


def test_few_turns_of_a_long_trajectory_are_decoded() -> None:
    builder = TrajectoryBuilder()
    for turn in range(1000):
        builder.begin_turn(Role.TOOL)
        builder.add_context(np.array([turn], np.int32))
    result = Result(job_id="a", task="t", outcome=Outcome.COMPLETED, reward=1.0, tokens=1000, turns=1000)
    (row,) = sample_conversations([Trajectory.from_frame(result, builder.block())], words)
    assert row.text.count("[tool, turn ") == TURNS
    assert row.text.startswith("[tool, turn 0]\n0\n")
    assert row.text.endswith("[tool, turn 999]\n999")


@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), st.text() | st.just(HOSTILE) | st.just(HOSTILE * 20_000))))
def test_any_text_is_printable_and_bounded(turns: list[tuple[str, str]]) -> None:
    row = conversation(Result(job_id="a", task="t", outcome=Outcome.COMPLETED), turns)
    assert len(row.text) <= TEXT_CHARACTERS + NOTED
    assert not [
        letter for letter in row.text.replace("\n", "") if unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Cs")
    ]
    assert not set(row.text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def test_secrets_are_left_out() -> None:
    keep_secret("sk-trackers-test-secret")
    row = conversation(
        Result(job_id="a", task="t", outcome=Outcome.COMPLETED), [("tool", "key sk-trackers-test-secret")]
    )
    assert row.text == "[tool]\nkey [secret]"


def test_a_table_fits_into_a_packet() -> None:
    rows = [Conversation(str(n), "t", "completed", 1.0, 1, "\U0001f600" * 10_000) for n in range(20)]
    kept = fitting(rows)
    assert 0 < len(kept) < ROWS
    assert sum(len(msgspec.msgpack.encode(row)) for row in kept) <= TABLE_BYTES


@given(st.lists(st.integers()), st.integers(1, 20))
def test_a_spread_has_both_ends(items: list[int], count: int) -> None:
    chosen = spread(items, lambda each: each, count)
    assert len(chosen) == min(len(items), count)
    assert chosen == sorted(chosen)
    if items and count > 1:
        assert (chosen[0], chosen[-1]) == (min(items), max(items))
