"""Turns that are several messages: reasoning, what is said, and calls, each in a frame of the form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["thought", "said", "call"]


class TurnMessage(NamedTuple):
    """One message of a turn."""

    kind: Kind
    start: int
    end: int
    """With its frame."""
    body: str
    name: str = ""
    """Of the tool that is called."""


def without_thoughts(text: str, messages: Iterable[TurnMessage]) -> tuple[str | None, str]:
    """Return the reasoning of a turn, None if it has none, and its other messages with their frames."""
    thoughts, rest, position = [], [], 0
    for message in messages:
        if message.kind == "thought":
            thoughts.append(message.body)
            rest.append(text[position : message.start])
            position = message.end
    return "\n".join(thoughts) if thoughts else None, "".join(rest) + text[position:]


def said_before_calls(text: str, messages: Iterable[TurnMessage]) -> str:
    """Return what a turn says before its first call, without frames; all of it if it has none."""
    said, found = [], False
    for message in messages:
        found = True
        if message.kind == "call":
            break
        if message.kind == "said":
            said.append(message.body)
    return "".join(said) if found else text
