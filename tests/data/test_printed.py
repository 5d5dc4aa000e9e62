from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import msgspec
import numpy as np
from finished_groups import chat, group, with_tool

from prorl_zmq.data.printed import NOTE_CHARACTERS, SHOWN_TURNS
from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.wire.messages.jobs import Outcome, Result

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\r\nsecond line"


class Tags(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    return tags


def of_turns(turns: int, **given: Any) -> Trajectory:
    builder = TrajectoryBuilder()
    for number in range(turns):
        builder.begin_turn(Role.USER if number % 2 == 0 else Role.ASSISTANT)
        ids = np.array([10 * number, 10 * number + 1], np.int32)
        if number % 2 == 0:
            builder.add_context(ids)
        else:
            builder.add_generated(ids, np.array([-0.5, -1.5], np.float32), np.full(2, number, np.int32))
    values = {"outcome": Outcome.COMPLETED, "reward": 1.0} | given
    result = Result(job_id="a-1", task="math", tokens=builder.tokens, turns=turns, **values)
    return Trajectory.from_frame(result, builder.block())


def failed() -> Trajectory:
    error = ErrorInfo("handler_failed", HOSTILE)
    return of_turns(2, outcome=Outcome.FAILED, reward=None, error=error, notes={HOSTILE: HOSTILE})


def test_a_trajectory_is_one_line() -> None:
    assert repr(of_turns(4)) == (
        "<Trajectory a-1: completed, reward 1, 8 tokens (4 generated) in 4 turns, weights 1 to 3>"
    )
    assert repr(failed()) == ("<Trajectory a-1: failed (handler_failed), 4 tokens (2 generated) in 2 turns, weights 1>")


def test_a_trajectory_without_tokens_is_one_line() -> None:
    empty = Trajectory.from_frame(Result(job_id="a", task="math", outcome=Outcome.CANCELLED), b"")
    assert repr(empty) == "<Trajectory a: cancelled, 0 tokens (0 generated) in 0 turns>"
    assert empty.text() == "a: cancelled, 0 tokens (0 generated) in 0 turns"
    assert "<td>" not in empty._repr_html_()


def test_long_arrays_make_no_long_line() -> None:
    assert len(repr(of_turns(2000))) < 120


def test_a_code_with_escapes_stays_in_its_line() -> None:
    odd = of_turns(2, outcome=Outcome.FAILED, reward=None, error=ErrorInfo("bad\n\x1b[2J" + "x" * 500, "it broke"))
    assert repr(odd).isprintable()
    assert len(repr(odd)) < 250


def test_a_reward_that_is_no_number_is_shown_as_such() -> None:
    assert "reward nan" in repr(of_turns(2, reward=float("nan")))
    assert repr(group("a", chat([1], [2], None), chat([1], [3], 0.25))).startswith(
        "<Group a: 2 rollouts of prompt-a, rewards nan, 0.25, "
    )


def test_the_text_has_each_turn_below_its_role() -> None:
    head = "a-1: completed, reward 1, 4 tokens (2 generated) in 2 turns, weights 1"
    assert of_turns(2).text() == f"{head}\n\n[user]\n0 1\n\n[assistant]\n10 11"
    words = {0: "What is ", 1: "1 + 1?", 10: "2", 11: "."}
    text = of_turns(2).text(lambda ids: "".join(words[each] for each in ids))
    assert text == f"{head}\n\n[user]\nWhat is 1 + 1?\n\n[assistant]\n2."


def test_the_text_can_be_printed_to_a_terminal() -> None:
    text = failed().text(lambda _: HOSTILE)
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("<script>alert(1)</script>\\x1b[31m\\u202e\nsecond line") == 3
    assert text.endswith("\nsecond line")


def test_a_notebook_shows_the_turns_in_figures() -> None:
    page = read(of_turns(4)._repr_html_())
    assert page.tags.count("tr") == 5
    assert "assistant242-1.000" in page.text  # tokens 2 to 4, 2 generated


def test_a_notebook_runs_nothing_of_what_a_rollout_says() -> None:
    page = read(failed()._repr_html_())
    assert set(page.tags) == {"div", "b", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"}
    assert page.text.count("<script>alert(1)</script>") == 3  # the error, the note and its name
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text


def test_a_notebook_gets_no_endless_page() -> None:
    html = of_turns(SHOWN_TURNS + 7, notes={"answer": "x" * (NOTE_CHARACTERS + 9)})._repr_html_()
    page = read(html)
    assert page.tags.count("tr") == SHOWN_TURNS + 1
    assert "7 more turns are not shown." in page.text
    assert "… (9 more characters)" in page.text


def test_a_group_is_one_line_and_a_table() -> None:
    one = group("a", chat([1], [2], 0.5, version=7), with_tool(1.0))
    assert repr(one) == "<Group a: 2 rollouts of prompt-a, rewards 0.5, 1, weights 4 to 7>"
    page = read(one._repr_html_())
    assert page.tags.count("tr") == 3
    assert all(trajectory.job_id in page.text for trajectory in one.trajectories)


def test_a_group_of_many_rollouts_is_one_short_line() -> None:
    assert repr(group("a", *(chat([1], [2], 1.0) for _ in range(64)))).count("1, ") < 12


def test_a_group_escapes_what_its_rollouts_say() -> None:
    one = group("a", chat([1], [2], 0.5))
    trajectory = one.trajectories[0]
    result = msgspec.structs.replace(trajectory.result, stop_reason=HOSTILE)
    hostile = Trajectory(
        trajectory.token_ids,
        trajectory.loss_mask,
        trajectory.logprobs,
        trajectory.weight_versions,
        trajectory.turns,
        result,
    )
    page = read(type(one)("a", HOSTILE, (hostile,))._repr_html_())
    assert "script" not in page.tags
    assert "\x1b" not in page.text
