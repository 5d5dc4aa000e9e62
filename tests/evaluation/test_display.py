"""How rollouts are laid out for the terminal, and what a hostile model can do to it: nothing."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from finished_groups import Talk, Turn, played
from msgspec.structs import replace
from rich.console import Console, RenderableType

from prorl_zmq.data.trajectory import Role
from prorl_zmq.evaluation.collection import open_collection
from prorl_zmq.evaluation.display import (
    SCALE,
    TOKEN_HEADERS,
    clean,
    head,
    notes_text,
    rollout_table,
    token_style,
    token_table,
    token_text,
    turn_body,
    turns_text,
)
from prorl_zmq.evaluation.run_folder import ARRAYS, RESULTS
from prorl_zmq.evaluation.transcript import Transcript
from prorl_zmq.wire.messages.jobs import Outcome

from .conftest import HOSTILE, write_run

if TYPE_CHECKING:
    from pathlib import Path


def printed(*parts: RenderableType) -> str:
    screen = Console(file=io.StringIO(), width=200, force_terminal=False)
    for part in parts:
        screen.print(part)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_tokens_and_reward_are_shown_as_they_were_recorded(tmp_path: Path) -> None:
    write_run(tmp_path, problems=1, samples=1, rewards=(0.25,))
    collection = open_collection(tmp_path)
    rollout = collection.rollouts[0]
    header, *rows = printed(token_table(collection.transcript(rollout))).splitlines()
    assert tuple(header.split()) == TOKEN_HEADERS
    assert len(rows) == 37
    assert rows[21].split() == ["21", "What", "498"]
    assert rows[34].split() == ["34", "The·answer·is·", "507", "generated", "-3.0000", "3"]
    assert rows[35].split()[-2] == "-1.5050"
    assert str(head(rollout)).splitlines() == [
        f"job {rollout.job_id}, task math, problem-0",
        "completed, reward 0.25, stopped by done, 37 tokens, 1 turn of the model, 8.000 s, model tiny",
    ]
    timings = {"backend_wait": 0.000315914, "run": 75.0}
    text = str(notes_text(replace(rollout, result=replace(rollout.result, timings=timings))))
    assert "timings\n  backend_wait: 0.000 s\n  run: 1 min 15 s\n" in text


@pytest.mark.parametrize("fits", [True, False])
def test_who_spoke_and_what_each_turn_earned_is_shown(tmp_path: Path, fits: bool) -> None:
    """Of a folder of `prorl submit --out`; results that do not fit the arrays are shown without."""
    one = played(
        [
            Talk(
                "white",
                [Turn(Role.USER, [1]), Turn(Role.ASSISTANT, [], [(2, -0.5, 0)], reward=-0.5)],
                1.0,
                "environment",
            ),
            Talk("user", [], trained=False),
            Talk("black", [Turn(Role.USER, [1]), Turn(Role.ASSISTANT, [], [(3, -0.5, 0)])], -1.0),
        ],
        job_id="game",
    )
    (tmp_path / "arrays").mkdir()
    arrays = {name: getattr(one, name) for name in ARRAYS}
    np.savez(tmp_path / "arrays" / "game.npz", **arrays)
    result = one.result if fits else msgspec.structs.replace(one.result, turn_rewards=((99, 1.0),))
    (tmp_path / RESULTS).write_bytes(msgspec.json.encode(result) + b"\n")
    collection = open_collection(tmp_path)
    (rollout,) = collection.rollouts
    titles = [line for line in printed(turns_text(collection.transcript(rollout))).splitlines() if "·" in line]
    turns = ["0  user · white", "1  assistant · white · reward -0.5", "2  user · black", "3  assistant · black"]
    assert [title.partition(" · tokens")[0] for title in titles] == (
        turns if fits else ["0  user", "1  assistant", "2  user", "3  assistant"]
    )
    assert str(head(rollout)).splitlines()[2:] == [
        "conversation white, reward 1, stopped by environment",
        "conversation user, not trained",
        "conversation black, reward -1",
    ]


def test_everything_printed_is_harmless(tmp_path: Path) -> None:
    write_run(tmp_path, problems=1, samples=1, said=HOSTILE, tool_says=HOSTILE, name=HOSTILE, notes={HOSTILE: HOSTILE},
              outcome=Outcome.FAILED, message=HOSTILE)  # fmt: skip
    collection = open_collection(tmp_path)
    rollout = collection.rollouts[0]
    transcript = collection.transcript(rollout)
    parts = [rollout_table(collection.rollouts), head(rollout), notes_text(rollout)]
    parts += [turn_body(turn, transcript) for turn in transcript.turns]
    parts += [token_text(transcript), token_table(transcript)]
    text = printed(*parts)
    assert not unprintable(text)
    assert text.count("[red]not red[/red]") >= 5


def unprintable(text: str) -> set[str]:
    return {character for character in text if not character.isprintable()} - {"\n"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb", "a    b"),
        ("a\r\nb\rc", "a\nb\\rc"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a" * 10, "aaaa\n… (6 more characters)"),
    ],
)
def test_texts_are_cleaned(text: str, shown: str) -> None:
    assert clean(text, 4 if text == "a" * 10 else 100) == shown


def test_tokens_are_coloured_by_probability() -> None:
    logprobs = (-0.01, -0.5, -1.2, -2.5, -5.0, None)
    transcript = Transcript(
        job_id="j",
        token_ids=tuple(range(7)),
        mask=(1,) * 6 + (0,),
        logprobs=(*logprobs, None),
        versions=(3,) * 6 + (-1,),
    )
    styles = [token_style(transcript, index) for index in range(7)]
    assert styles[:5] == [style for _, style in SCALE]
    assert styles[5:] == ["bold", "dim"]
