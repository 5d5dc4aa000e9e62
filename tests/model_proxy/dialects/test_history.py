from __future__ import annotations

import pytest

from prorl_zmq.data.trajectory import Role
from prorl_zmq.model_proxy.calls import CallRefused, RequestCall
from prorl_zmq.model_proxy.dialects.history import PIECES, History

ONE, TWO = "prt0000000000000001", "prt0000000000000002"


def call(turn_id: str, number: int) -> RequestCall:
    return RequestCall(f"call_{turn_id}_{number}", "bash", "{}")


def test_pieces_in_a_row_are_one_turn() -> None:
    history = History()
    history.assistant(reasoning="hm", ids=[f"rs_{ONE}"])
    history.assistant("I ")
    history.assistant("look.", calls=[call(ONE, 0)])
    (turn,) = history.messages
    assert (turn.text, turn.reasoning, turn.calls, turn.turn_ids) == ("I look.", "hm", (call(ONE, 0),), (ONE,))


def test_calls_of_one_turn_with_answers_between_are_one_turn() -> None:
    history = History()
    history.assistant(calls=[call(ONE, 0)])
    history.answer("call_0", "a")
    history.assistant(calls=[call(ONE, 1)])
    history.answer("call_1", "b")
    assert [message.role for message in history.messages] == [Role.ASSISTANT, Role.TOOL, Role.TOOL]
    assert history.messages[0].calls == (call(ONE, 0), call(ONE, 1))


def test_other_turns_stay_apart() -> None:
    history = History()
    history.assistant(calls=[call(ONE, 0)])
    history.assistant(calls=[call(TWO, 0)])
    history.answer("call_0", "a")
    history.assistant("no id")
    history.say(Role.USER, "go on")
    history.assistant(calls=[call(TWO, 1)])
    roles = [Role.ASSISTANT, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert [message.role for message in history.messages] == roles


def test_more_parts_than_any_harness_sends_are_refused_and_fewer_take_no_time() -> None:
    """Pieces of one turn with answers between them took time that was quadratic: one request could stop a process."""
    history = History()
    for number in range(PIECES // 2):
        history.assistant("a", ids=["prt0123456789abcdef"])
        history.answer(f"{number}", "b")
    first, *answers = history.messages
    assert (len(first.text), len(answers)) == (PIECES // 2, PIECES // 2)
    with pytest.raises(CallRefused, match=f"more than {PIECES} parts"):
        history.say(Role.USER, "one too many")


def answers(history: History) -> list[str]:
    return [message.text for message in history.messages if message.role == Role.TOOL]


def test_answers_stand_in_the_order_of_the_calls() -> None:
    history = History()
    history.answer("early", "of no call")
    history.assistant(calls=[call(ONE, number) for number in range(3)])
    history.answer(f"call_{ONE}_2", "2")
    history.say(Role.USER, "by the way")
    history.answer("", "without an id")
    history.answer("call_of_another", "x")
    history.answer(f"call_{ONE}_0", "0")
    assert answers(history) == ["of no call", "0", "without an id", "x", "2"]
    assert [message.role for message in history.messages][3] == Role.USER
    history.assistant(calls=[call(TWO, 0)])
    history.answer(f"call_{ONE}_1", "late")
    history.answer(f"call_{TWO}_0", "3")
    assert answers(history)[-2:] == ["late", "3"]


def test_two_answers_of_one_call_and_more_answers_than_calls_stay() -> None:
    history = History()
    history.assistant(calls=[call(ONE, 0), call(ONE, 1)])
    for text, call_id in (("1", f"call_{ONE}_1"), ("1 again", f"call_{ONE}_1"), ("0", ""), ("more", ""), ("and", "")):
        history.answer(call_id, text)
    assert answers(history) == ["0", "1", "1 again", "more", "and"]
