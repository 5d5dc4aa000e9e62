"""Which turn a call continues, what it is for, and which turns nothing was built on: the cases of real harnesses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.data.trajectory import Role
from prorl_zmq.model_proxy.calls import ModelRequest, ReplyCall, RequestCall, RequestMessage, new_turn_id
from prorl_zmq.stages.harness.adapter import CallKind
from prorl_zmq.stages.harness.call_tree import CallTree, OrphanReason, Said, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOLS = ({"type": "function", "function": {"name": "bash", "parameters": {}}},)
SYSTEM = RequestMessage(Role.SYSTEM, "You are an agent.")
TASK = RequestMessage(Role.USER, "Make the tests pass.")
SUMMARY = "The tests of the parser fail since the lexer drops the last token of a line."
ALL = frozenset(CallKind)


def user(text: str) -> RequestMessage:
    return RequestMessage(Role.USER, text)


def request(*messages: RequestMessage, tools: Sequence[dict[str, Any]] = TOOLS, front: str = "") -> ModelRequest:
    system = SYSTEM if not front else RequestMessage(Role.SYSTEM, front)
    return ModelRequest((system, *messages), tuple(tools))


def opened(tree: CallTree, asked: ModelRequest, kind: CallKind | None = None) -> Turn:
    return tree.open(new_turn_id(), asked, tree.locate(asked), kind)


def answered(tree: CallTree, turn: Turn, text: str = "", command: str = "", *, delivered: bool = True) -> Turn:
    arguments = msgspec.json.encode({"command": command}).decode()
    calls = (ReplyCall(f"call_{turn.turn_id}_0", "bash", arguments),) if command else ()
    tree.replied(turn, Said(text, calls))
    tree.close(turn, delivered=delivered)
    return turn


def asked(
    tree: CallTree, asked_for: ModelRequest, text: str = "", command: str = "", *, delivered: bool = True
) -> Turn:
    return answered(tree, opened(tree, asked_for), text, command, delivered=delivered)


def echoed(turn: Turn, *, named: bool = True) -> RequestMessage:
    """The turn as a harness sends it back."""
    assert turn.said is not None
    calls = tuple(RequestCall(call.call_id, call.name, call.arguments) for call in turn.said.calls)
    return RequestMessage(Role.ASSISTANT, turn.said.text, "", calls, turn_ids=(turn.turn_id,) if named else ())


def result(turn: Turn, text: str) -> RequestMessage:
    return RequestMessage(Role.TOOL, text, call_id=f"call_{turn.turn_id}_0")


def lines(tree: CallTree, kinds: frozenset[CallKind] = ALL) -> list[list[Turn]]:
    return [[turn for turn, _ in line] for line in tree.segments(kinds)]


def test_a_conversation_is_one_line() -> None:
    tree = CallTree()
    first = asked(tree, request(TASK), command="ls")
    second = asked(tree, request(TASK, echoed(first), result(first, "a b")), command="cat a")
    third = asked(
        tree, request(TASK, echoed(first), result(first, "a b"), echoed(second), result(second, "x")), "Done."
    )
    assert tree.locate(request(TASK, echoed(first), result(first, "other"))).parent is first
    assert (second.parent, third.parent) == (first, second)
    assert lines(tree) == [[first, second, third]]
    assert {turn.kind for turn in tree.turns} == {CallKind.MAIN}
    assert not tree.orphans()


def test_a_turn_is_found_by_its_ids_whatever_was_done_to_it() -> None:
    tree = CallTree()
    first = asked(tree, request(TASK), "I look.", command="ls -l")
    rewritten = replace(echoed(first), text="", calls=(RequestCall(f"call_{first.turn_id}_0", "invalid", "{}"),))
    place = tree.locate(request(TASK, rewritten, result(first, "no such tool")))
    assert place.parent is first
    assert [message.role for message in place.new] == [Role.TOOL]


def test_a_turn_without_ids_is_found_by_its_text() -> None:
    tree = CallTree()
    first = asked(tree, request(TASK), "Try this:\n\n  ls  ")
    place = tree.locate(request(TASK, RequestMessage(Role.ASSISTANT, "Try this: ls"), user("a b")))
    assert place.parent is first
    other = tree.locate(request(TASK, RequestMessage(Role.ASSISTANT, "Try that: ls"), user("a b")))
    assert other.parent is None
    assert len(other.new) == 4


def test_a_history_that_differs_begins_a_line() -> None:
    """An id names a turn, but the engine saw something else before it: its tokens are no prefix of this."""
    tree = CallTree()
    first = asked(tree, request(TASK), command="ls")
    assert tree.locate(request(user("Another task."), echoed(first), result(first, "a"))).parent is None
    assert tree.locate(request(TASK, echoed(first), tools=())).parent is None
    assert tree.locate(request(TASK, echoed(first), front="You are another.")).parent is None


def test_of_a_repeated_request_the_sample_that_is_built_on_stays() -> None:
    for built_on in (0, 1):
        tree = CallTree()
        twins = [asked(tree, request(TASK), command=f"ls {number}") for number in range(2)]
        kept = twins[built_on]
        last = asked(tree, request(TASK, echoed(kept), result(kept, "a")), "Done.")
        assert lines(tree) == [[kept, last]]
        assert tree.orphans() == {twins[1 - built_on]: OrphanReason.RETRIED}


def test_a_reply_that_was_cut_is_an_orphan_and_so_is_what_was_asked_again() -> None:
    tree = CallTree()
    cut = asked(tree, request(TASK), command="ls", delivered=False)
    assert tree.orphans() == {cut: OrphanReason.UNDELIVERED}
    again = asked(tree, request(TASK), command="ls")
    assert tree.orphans() == {cut: OrphanReason.RETRIED}
    assert lines(tree) == [[again]]


def test_a_failed_call_has_no_tokens_and_is_no_orphan() -> None:
    tree = CallTree()
    failed = opened(tree, request(TASK))
    tree.close(failed, delivered=False)
    again = asked(tree, request(TASK), "Done.")
    assert again.kind == CallKind.MAIN
    assert not tree.orphans()
    assert lines(tree) == [[again]]


def test_two_equal_calls_at_the_same_time_both_stay() -> None:
    tree = CallTree()
    first, second = opened(tree, request(TASK)), opened(tree, request(TASK))
    answered(tree, second, "Two.")
    answered(tree, first, "One.")
    assert not tree.orphans()
    assert lines(tree) == [[first], [second]]


def test_a_reply_that_the_harness_could_not_read_is_dropped() -> None:
    """mini-swe-agent: the history says nothing of the turn, only that it was wrong."""
    tree = CallTree()
    first = asked(tree, request(TASK), command="ls")
    history = (TASK, echoed(first), result(first, "a"))
    wrong = asked(tree, request(*history), "I forgot to call a tool.")
    better = asked(tree, request(*history, user("No tool call was found.")), command="cat a")
    assert tree.orphans() == {wrong: OrphanReason.DROPPED}
    assert better.parent is first
    assert lines(tree) == [[first, better]]


def test_a_sub_agent_is_known_by_the_task_that_it_was_given() -> None:
    tree = CallTree()
    first = asked(tree, request(TASK), command="Find all callers of parse() in src.")
    child = asked(tree, request(user("Find all callers of parse() in src."), front="You search."), command="grep parse")
    inner = asked(
        tree,
        request(user("Find all callers of parse() in src."), echoed(child), result(child, "a:1"), front="You search."),
        "a:1",
    )
    last = asked(tree, request(TASK, echoed(first), result(first, "a:1")), "Done.")
    assert [turn.kind for turn in tree.turns] == ["main", "subagent", "subagent", "main"]
    assert lines(tree) == [[first, last], [child, inner]]
    assert lines(tree, frozenset({CallKind.MAIN})) == [[first, last]]
    assert lines(tree, frozenset({CallKind.SUBAGENT})) == [[child, inner]]


def test_headers_tell_more_than_texts() -> None:
    tree = CallTree()
    asked(tree, request(TASK), command="ls")
    hinted = opened(tree, request(user("hello"), front="Other."), CallKind.SUBAGENT)
    assert hinted.kind == CallKind.SUBAGENT


def test_a_title_that_comes_first_is_not_the_main_line() -> None:
    tree = CallTree()
    title = asked(tree, request(user("Title for: Make the tests pass."), tools=(), front="You name chats."), "Tests")
    first = asked(tree, request(TASK), command="ls")
    assert (title.kind, first.kind) == (CallKind.SIDE, CallKind.MAIN)


def test_what_was_never_answered_is_no_main_line() -> None:
    """A first prompt that is too long: the harness begins anew with a shorter one."""
    tree = CallTree()
    refused = opened(tree, request(user("far too long")))
    tree.close(refused, delivered=False)
    assert asked(tree, request(user("shorter"), front="Other."), "Done.").kind == CallKind.MAIN


def test_the_main_line_is_the_one_that_was_asked_for() -> None:
    """A program that has a helper look around first, with tools of its own."""
    tree = CallTree(TASK.text)
    helper = asked(tree, request(user("Which files are there?"), front="You look around."), command="ls")
    main = asked(tree, request(user(f"Context: none.\n\n{TASK.text}")), command="cat a")
    memory = asked(tree, request(user(f"They asked: {TASK.text}"), front="You keep memories."), "Nothing.")
    assert [turn.kind for turn in (helper, main, memory)] == ["side", "main", "side"]


def test_side_calls() -> None:
    tree = CallTree()
    asked(tree, request(TASK), command="ls")
    memory = asked(tree, request(user("What is worth keeping?"), front="You keep memories."), "Nothing.")
    commit = asked(tree, request(user("Write a commit message."), tools=(), front="You write commits."), "Fix it")
    assert (memory.kind, commit.kind) == (CallKind.SIDE, CallKind.SIDE)


def test_who_reads_the_last_words_with_other_tools_does_not_go_on() -> None:
    """Qwen Code: an agent that keeps memories is told what was said, after the end."""
    tree = CallTree()
    last = asked(tree, request(TASK), SUMMARY)
    tools = ({"type": "function", "function": {"name": "remember", "parameters": {}}},)
    memory = asked(tree, request(user(f"They said: {SUMMARY}"), tools=tools, front="You keep memories."), "Nothing.")
    assert (last.kind, memory.kind) == (CallKind.MAIN, CallKind.SIDE)


def test_a_compaction_within_the_conversation() -> None:
    """Claude Code: the same history and another instruction; then a new one with the summary and the last turn."""
    tree = CallTree()
    first = asked(tree, request(TASK), command="ls")
    history = (TASK, echoed(first), result(first, "a"))
    second = asked(tree, request(*history), command="cat a")
    reply = f"<analysis>Nobody will ever be told of this line, long as it is.</analysis><summary>{SUMMARY}</summary>"
    summary = asked(tree, request(*history, user("CRITICAL: Respond with TEXT ONLY")), reply)
    told = user(f"This session is being continued. Summary: {SUMMARY}")
    after = asked(tree, request(told, echoed(second), result(second, "x")), "Done.")
    assert [turn.kind for turn in tree.turns] == ["main", "main", "compaction", "main"]
    assert not tree.orphans()
    assert lines(tree, frozenset({CallKind.MAIN})) == [[first, second], [after]]
    owners = [[own for _, own in line] for line in tree.segments(ALL)]
    assert lines(tree) == [[first, second], [first, summary], [after]]
    assert owners == [[True, True], [False, True], [True]]


def test_a_compaction_of_another_conversation() -> None:
    """Codex and OpenCode: without tools; what follows is known by the summary, though its system message differs."""
    tree = CallTree()
    first = asked(tree, request(TASK), command="ls")
    summary = asked(tree, request(TASK, echoed(first), result(first, "a"), user("CHECKPOINT"), tools=()), SUMMARY)
    assert summary.parent is None
    after = asked(tree, request(TASK, user(f"Another model started: {SUMMARY}"), front="Billing 2"), "Done.")
    assert [turn.kind for turn in tree.turns] == ["main", "compaction", "main"]
    assert lines(tree, frozenset({CallKind.MAIN})) == [[first], [after]]


def test_a_turn_that_called_a_tool_is_no_summary_whoever_quotes_it() -> None:
    """A program could have the main line left out, by a call of its own while the tool runs."""
    tree = CallTree(TASK.text)
    first = asked(tree, request(TASK), SUMMARY, command="ls")
    forged = asked(tree, request(user(f"They said: {SUMMARY}")), "garbage")
    last = asked(tree, request(TASK, echoed(first), result(first, "a")), "Done.")
    assert [turn.kind for turn in (first, forged, last)] == ["main", "side", "main"]


def test_a_summary_that_is_gone_on_with_was_none() -> None:
    tree = CallTree(TASK.text)
    first = asked(tree, request(TASK), SUMMARY)
    other = asked(tree, request(user(f"They said: {SUMMARY}")), "What?")
    assert (first.kind, other.kind) == (CallKind.COMPACTION, CallKind.MAIN)
    last = asked(tree, request(TASK, echoed(first), user("Go on.")), "Done.")
    assert [turn.kind for turn in (first, last)] == ["main", "main"]


def test_two_equal_turns_that_arrived_both_stay() -> None:
    """Or a program could have its last turn forgotten, and a better one in its place."""
    tree = CallTree()
    first = asked(tree, request(TASK), "Bad.")
    again = asked(tree, request(TASK), "Good.")
    assert not tree.orphans()
    assert lines(tree) == [[first], [again]]


def test_rollouts_behind_one_address_are_told_apart() -> None:
    """Eight of the same prompt whose policy says the same, without ids: one after another, and all at a time."""
    spoken = request(TASK, RequestMessage(Role.ASSISTANT, "Try ls."), user("a b"))
    one_by_one = CallTree(TASK.text)
    for _ in range(8):
        asked(one_by_one, request(TASK), "Try ls.")
        asked(one_by_one, spoken, "Done.")
    at_a_time = CallTree(TASK.text)
    for first in [opened(at_a_time, request(TASK)) for _ in range(8)]:
        answered(at_a_time, first, "Try ls.")
    for second in [opened(at_a_time, spoken) for _ in range(8)]:
        answered(at_a_time, second, "Done.")
    for tree in (one_by_one, at_a_time):
        assert not tree.orphans()
        assert [len(line) for line in lines(tree)] == [2] * 8
        assert {turn.kind for turn in tree.turns} == {CallKind.MAIN}


def test_a_rollout_of_one_turn_is_not_merged_with_one_that_continues() -> None:
    tree = CallTree()
    ended = asked(tree, request(TASK), "It is 7.")
    other = asked(tree, request(TASK), "Let me see.")
    last = asked(tree, request(TASK, echoed(other, named=False), user("Go on.")), "It is 8.")
    assert not tree.orphans()
    assert lines(tree) == [[ended], [other, last]]


def test_a_history_finds_its_way_through_equal_turns() -> None:
    """The second of two equal turns was continued: the history goes on there, though the first has no successor."""
    tree = CallTree()
    asked(tree, request(TASK), "Try ls.")
    kept = asked(tree, request(TASK), "Try ls.")
    history = (TASK, RequestMessage(Role.ASSISTANT, "Try ls."), user("a b"))
    other = asked(tree, request(*history), "Cat a.")
    second = asked(tree, request(*history), "Cat b.")
    assert {other.parent, second.parent} == {tree.turns[0], kept}
    for turn in (other, second):
        assert turn.said is not None
        asked_for = request(*history, RequestMessage(Role.ASSISTANT, turn.said.text), user("x"))
        assert tree.locate(asked_for).parent is turn
    cut = asked(tree, request(*history, RequestMessage(Role.ASSISTANT, "Cat b."), user("x")), "Do", delivered=False)
    again = asked(tree, request(*history, RequestMessage(Role.ASSISTANT, "Cat b."), user("x")), "Done.")
    assert (cut.parent, again.parent) == (second, second)
    assert tree.orphans() == {cut: OrphanReason.RETRIED}


@given(data=st.data())
def test_every_turn_is_one_lines_own_or_an_orphan(data: st.DataObject) -> None:
    """A harness that retries, branches, drops and begins anew as it likes, several calls at a time."""
    tree = CallTree()
    known: list[tuple[ModelRequest, Turn]] = []
    flying: list[tuple[ModelRequest, Turn]] = []
    for step in range(data.draw(st.integers(1, 14))):
        if flying and data.draw(st.booleans()):
            asked_for, turn = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            if data.draw(st.integers(0, 4)):
                answered(tree, turn, f"text {step}", delivered=data.draw(st.booleans()))
                known.append((asked_for, turn))
            else:
                tree.close(turn, delivered=False)
            continue
        how = data.draw(st.sampled_from(["new", "continue", "again", "drop"])) if known else "new"
        if how == "new":
            asked_for = request(user(f"task {step}"), front=data.draw(st.sampled_from(["A", "B"])))
        else:
            before, turn = data.draw(st.sampled_from(known))
            named = data.draw(st.booleans())
            added = {"continue": (echoed(turn, named=named), user(f"go on {step}")), "drop": (user(f"no {step}"),)}
            asked_for = replace(before, messages=(*before.messages, *added.get(how, ())))
        flying.append((asked_for, opened(tree, asked_for)))
    orphans = tree.orphans()
    answered_turns = [turn for turn in tree.turns if turn.said is not None]
    own = [turn for line in tree.segments(ALL) for turn, is_own in line if is_own]
    assert sorted([*own, *orphans], key=id) == sorted(answered_turns, key=id)
    for line in tree.segments(ALL):
        turns = [turn for turn, _ in line]
        assert all(child.parent is turn for turn, child in pairwise(turns))
        assert turns[0].parent is None
        assert all(turn.said is not None for turn in turns)
