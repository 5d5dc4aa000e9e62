"""Alternative forms of a conversation, for a template that rejects its messages; forms with fewer changes come first.

A template may allow only one system message, one call per turn, or no two messages of the user in a row. All forms but
the last keep calls and answers. The last form is text alone, with alternating messages of user and policy, and calls as
the policy writes them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, groupby
from typing import TYPE_CHECKING, Any

from ...data.trajectory import Role
from . import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def forms(
    messages: Sequence[ChatMessage], write: Callable[[str, dict[str, Any]], str]
) -> Iterator[Sequence[ChatMessage]]:
    """Yield the messages unchanged, then each other form, those with fewer changes first.

    Args:
        messages: of a conversation, or those that follow a turn.
        write: returns the text of a call.
    """
    given: list[Sequence[ChatMessage]] = [messages]
    yield messages
    changes = (systems_as_user, one_call_a_turn, joined, joined_to_answers)
    for size in range(1, len(changes) + 1):
        for chosen in combinations(changes, size):
            form = messages
            for change in chosen:
                form = change(form)
            if form not in given:
                given.append(form)
                yield form
    yield as_text(messages, write)


def systems_as_user(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with system messages after the beginning as the user's."""
    first = next((index for index, message in enumerate(messages) if message.role != Role.SYSTEM), len(messages))
    return [
        replace(message, role=Role.USER) if message.role == Role.SYSTEM and index > first else message
        for index, message in enumerate(messages)
    ]


def one_call_a_turn(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with a turn of several calls as several turns, each with the answer to its call."""
    told: list[ChatMessage] = []
    rest = list(messages)[::-1]
    while rest:
        turn = rest.pop()
        answers: list[ChatMessage] = []
        while len(turn.calls) > 1 and rest and rest[-1].role == Role.TOOL:
            answers.append(rest.pop())
        if len(turn.calls) < 2:
            told.append(turn)
            continue
        for number, call in enumerate(turn.calls):
            told.append(replace(turn, calls=(call,)) if not number else ChatMessage(Role.ASSISTANT, "", calls=(call,)))
            named = next((answer for answer in answers if answer.call_id == call.call_id), None)
            if (answer := named or (answers[0] if answers else None)) is not None:
                answers.remove(answer)
                told.append(answer)
        told += answers
    return told


def joined(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with consecutive user messages, or turns without calls, joined."""
    told: list[ChatMessage] = []
    for message in messages:
        last = told[-1] if told else None
        if (
            last is not None
            and last.role == message.role
            and message.role in {Role.USER, Role.ASSISTANT}
            and not (last.calls or message.calls)
        ):
            told[-1] = replace(last, content=f"{last.content}\n\n{message.content}")
        else:
            told.append(message)
    return told


def joined_to_answers(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with those after a tool's answer, except turns, appended to that answer."""
    told: list[ChatMessage] = []
    for message in messages:
        if told and told[-1].role == Role.TOOL and message.role in {Role.USER, Role.SYSTEM}:
            told[-1] = replace(told[-1], content=f"{told[-1].content}\n\n{message.content}")
        else:
            told.append(message)
    return told


def as_text(messages: Sequence[ChatMessage], write: Callable[[str, dict[str, Any]], str]) -> list[ChatMessage]:
    """Return text alone: a first system message, then the user's and the policy's in turns."""
    first = list(messages[:1]) if messages and messages[0].role == Role.SYSTEM else []
    told = first
    for is_policy, run in groupby(messages[len(first) :], lambda message: message.role == Role.ASSISTANT):
        texts = [
            message.content + "".join(write(call.name, call.arguments) for call in message.calls) for message in run
        ]
        told.append(ChatMessage(Role.ASSISTANT if is_policy else Role.USER, "\n\n".join(texts)))
    return told
