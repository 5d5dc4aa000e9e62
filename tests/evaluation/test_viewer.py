"""The viewer, driven by textual's own pilot, and what a hostile model can do to it: nothing."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from textual.widgets import DataTable, Static, TabbedContent

from prorl_zmq.evaluation.collection import open_collection
from prorl_zmq.evaluation.display import (
    PAGE_TOKENS,
    SCALE,
    TOKEN_HEADERS,
    clean,
    head,
    notes_text,
    pages,
    rollout_table,
    token_rows,
    token_style,
    token_text,
    turn_body,
)
from prorl_zmq.evaluation.transcript import Transcript
from prorl_zmq.evaluation.viewer import RolloutList, RolloutView, Viewer
from prorl_zmq.wire.messages.jobs import Outcome

from .conftest import HOSTILE, write_run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from textual.pilot import Pilot

HARMLESS = "\\x1b]0;owned\\x07\\x1b[2J[red]not red[/red] <script>"


def drive(folder: Path, body: Callable[[Pilot[None], Viewer], Awaitable[None]], first: str = "") -> None:
    async def main() -> None:
        collection = open_collection(folder)
        viewer = Viewer(collection, collection.find(first) if first else None)
        async with viewer.run_test(size=(120, 36)) as pilot:
            await pilot.pause()
            await body(pilot, viewer)

    asyncio.run(main())


def text_of(viewer: Viewer, selector: str) -> str:
    return str(viewer.screen.query_one(selector, Static).content)


def test_the_list_is_sorted_and_filtered(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=2, rewards=(0.0, 1.0, 0.5, 1.0))

    async def body(pilot: Pilot[None], viewer: Viewer) -> None:
        screen = viewer.screen
        assert isinstance(screen, RolloutList)
        assert screen.query_one(DataTable).row_count == 4
        await pilot.press("s")
        assert [one.result.reward for one in screen.shown] == [0.0, 0.5, 1.0, 1.0]
        await pilot.press("r")
        assert [one.result.reward for one in screen.shown] == [1.0, 1.0, 0.5, 0.0]
        await pilot.press("f")
        assert [one.result.reward for one in screen.shown] == [1.0, 1.0]
        await pilot.press("f")
        assert [one.result.reward for one in screen.shown] == [0.5, 0.0]
        assert screen.query_one(DataTable).row_count == 2
        assert "filter: not solved" in text_of(viewer, "#title")

    drive(tmp_path, body)


def test_a_rollout_is_opened_looked_through_and_left(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=1, tool_says="files")

    async def body(pilot: Pilot[None], viewer: Viewer) -> None:
        await pilot.press("enter")
        await pilot.pause()
        screen = viewer.screen
        assert isinstance(screen, RolloutView)
        assert "problem-0" in text_of(viewer, "#head")
        titles = [str(one.content) for one in screen.query(".turn-title").results(Static)]
        assert [title.split()[1] for title in titles] == ["system", "user", "assistant", "tool", "assistant"]
        bodies = [str(one.content) for one in screen.query(".turn").results(Static)]
        assert '→ bash({"command": "ls"})' in bodies[2]
        for key, tab in (("2", "tokens"), ("3", "table"), ("4", "result"), ("1", "turns")):
            await pilot.press(key)
            assert screen.query_one(TabbedContent).active == tab
        assert screen.query_one("#token-table", DataTable).row_count == len(screen.transcript.token_ids)
        assert "turns: 1" in text_of(viewer, "#notes")
        await pilot.press("n")
        await pilot.pause()
        assert "problem-1" in text_of(viewer, "#head")
        await pilot.press("n")  # there is no further one
        assert screen.index == 1
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(viewer.screen, RolloutList)
        assert viewer.screen.query_one(DataTable).cursor_row == 1

    drive(tmp_path, body)


@pytest.mark.proof(quick=True)
def test_tokens_and_reward_are_shown_as_they_were_recorded(tmp_path: Path) -> None:
    write_run(tmp_path, problems=1, samples=1, rewards=(0.25,))
    collection = open_collection(tmp_path)
    rollout = collection.rollouts[0]
    rows = [[str(cell) for cell in row] for row in token_rows(collection.transcript(rollout), 0)]
    shown = {row[0]: dict(zip(TOKEN_HEADERS, row, strict=True)) for row in rows}
    assert shown["21"] == {"#": "21", "token": "What", "id": "498", "mask": "", "log-prob": "", "version": ""}
    assert shown["34"] == {
        "#": "34",
        "token": "The·answer·is·",
        "id": "507",
        "mask": "generated",
        "log-prob": "-3.0000",
        "version": "3",
    }
    assert shown["35"]["log-prob"] == "-1.5050"
    assert str(head(rollout)).splitlines() == [
        f"job {rollout.job_id}, task math, problem-0",
        "completed, reward 0.25, stopped by done, 37 tokens, 1 turns of the model, 8.000 s, model tiny",
    ]

    async def body(pilot: Pilot[None], viewer: Viewer) -> None:
        await pilot.pause()
        table = viewer.screen.query_one("#token-table", DataTable)
        assert [str(column.label) for column in table.ordered_columns] == list(TOKEN_HEADERS)
        assert [str(cell) for cell in table.get_row_at(34)] == list(shown["34"].values())
        assert "completed, reward 0.25, " in text_of(viewer, "#head")

    drive(tmp_path, body, "problem-0")


@pytest.mark.proof(quick=True)
def test_long_rollouts_have_pages_of_tokens(tmp_path: Path) -> None:
    write_run(tmp_path, problems=1, samples=1, said="!" * (2 * PAGE_TOKENS))

    async def body(pilot: Pilot[None], viewer: Viewer) -> None:
        await pilot.pause()
        screen = viewer.screen
        assert isinstance(screen, RolloutView)
        table = screen.query_one("#token-table", DataTable)
        assert table.row_count == PAGE_TOKENS
        await pilot.press("]", "]", "]")
        assert (screen.page, pages(screen.transcript)) == (2, 3)
        assert table.row_count == len(screen.transcript.token_ids) - 2 * PAGE_TOKENS
        await pilot.press("[")
        assert screen.page == 1

    drive(tmp_path, body, "problem-0")


@pytest.mark.proof(quick=True)
def test_a_damaged_rollout_is_said_and_the_viewer_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=1)
    job_id = open_collection(tmp_path).rollouts[0].job_id
    (tmp_path / "trajectories" / f"{job_id}.json").write_text("{")

    async def body(pilot: Pilot[None], viewer: Viewer) -> None:
        await pilot.press("enter")
        await pilot.pause()
        assert "is damaged" in text_of(viewer, "#head")
        await pilot.press("n")
        await pilot.pause()
        assert "is damaged" not in text_of(viewer, "#head")

    drive(tmp_path, body)


@pytest.mark.proof(quick=True)
def test_a_hostile_model_shows_as_text(tmp_path: Path) -> None:
    write_run(tmp_path, problems=1, samples=1, said=HOSTILE, tool_says=HOSTILE, name=HOSTILE, notes={HOSTILE: HOSTILE},
              outcome=Outcome.FAILED, message=HOSTILE)  # fmt: skip

    async def body(pilot: Pilot[None], viewer: Viewer) -> None:
        await pilot.press("enter")
        for key in "1234":
            await pilot.press(key)
            await pilot.pause()
            shown = [str(one.content) for one in viewer.screen.query(Static) if one.id != "legend"]
            assert any(HARMLESS in text for text in shown)
            assert not unprintable("".join(shown))

    drive(tmp_path, body)


def test_everything_printed_is_harmless(tmp_path: Path) -> None:
    write_run(tmp_path, problems=1, samples=1, said=HOSTILE, tool_says=HOSTILE, name=HOSTILE, notes={HOSTILE: HOSTILE},
              outcome=Outcome.FAILED, message=HOSTILE)  # fmt: skip
    collection = open_collection(tmp_path)
    rollout = collection.rollouts[0]
    transcript = collection.transcript(rollout)
    screen = Console(file=io.StringIO(), width=200, force_terminal=False)
    parts = [rollout_table(collection.rollouts), head(rollout), token_text(transcript, 0), notes_text(rollout)]
    parts += [turn_body(turn, transcript) for turn in transcript.turns]
    parts += [cell for row in token_rows(transcript, 0) for cell in row]
    for part in parts:
        screen.print(part)
    assert isinstance(screen.file, io.StringIO)
    printed = screen.file.getvalue()
    assert not unprintable(printed)
    assert printed.count("[red]not red[/red]") >= 5


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
