"""A chat format's findings about a model's template, for people: `prorl doctor --model`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...data.trajectory import Role
from ...errors import InvalidJob
from . import ChatMessage, PastCall
from .probes import common

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .transformers_chat import TransformersChatFormat

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
            "required": ["command"],
        },
    },
}
_ARGUMENTS: dict[str, Any] = {"command": "ls -l /tmp", "seconds": 5}
_OPENING = [ChatMessage(Role.SYSTEM, "Work in /tmp."), ChatMessage(Role.USER, "What is here?")]


class ChatReport(NamedTuple):
    """The content of `prorl doctor --model`."""

    rows: tuple[tuple[str, str], ...]
    """The findings: names and values."""
    conversation: tuple[tuple[str, str], ...]
    """An example: the role and the text of each part."""
    warnings: tuple[str, ...]
    """Unrecognised traits."""


def report(chat: TransformersChatFormat) -> ChatReport:
    traits = chat.traits
    reasoning = traits.reasoning
    before, after = reasoning.marks
    names = [chat.decode(np.array([token_id], np.int32)) for token_id in chat.stop_token_ids]
    rows = (
        ("tool calls", f"{traits.form.name}{'' if traits.writes_calls else ', written by us'}"),
        ("tools", "described by the template" if traits.shows_tools else "described in the system message"),
        ("tools' answers", "role tool" if traits.takes_results else "messages of the user"),
        ("reasoning", f"… {after}, opened by the prompt" if reasoning.opened else f"{before} … {after}"),
        ("reasoning of earlier turns", f"as {reasoning.key}" if reasoning.key else "part of the text"),
        ("stop tokens", ", ".join(f"{name} ({i})" for name, i in zip(names, chat.stop_token_ids, strict=True))),
        ("template arguments", ", ".join(sorted(chat.variables)) or "none"),
        ("call ids", "functions.NAME:N" if traits.named_ids else "nine letters and digits"),
    )
    warnings = [chat.warning]
    conversation: list[tuple[str, str]] = []
    try:
        conversation = _example(chat)
    except InvalidJob as error:
        warnings.append(f"the example conversation is refused: {error.message}")
    return ChatReport(rows, tuple(conversation), tuple(filter(None, warnings)))


def _example(chat: TransformersChatFormat) -> list[tuple[str, str]]:
    conversation = chat.conversation(_OPENING, [TOOL])
    prompt = conversation.prompt()
    shown = [(_name(piece.role), chat.decode(piece.token_ids)) for piece in prompt.pieces]
    turn = _turn(chat)
    generated = chat.tokenizer.encode(turn)[0]
    read = conversation.add_turn(generated)
    shown.append(("policy", turn))
    conversation.add_tool_results(["notes.txt"] * len(read.calls))
    again = conversation.prompt()
    name = "new segment: " if again.rewritten else ""
    shown += [(f"{name}{_name(piece.role)}", chat.decode(piece.token_ids)) for piece in again.pieces]
    return shown


def _turn(chat: TransformersChatFormat) -> str:
    """Return a turn that calls the tool, as the template writes it."""
    thought = "I list it." if chat.traits.reasoning.key else None
    calling = ChatMessage(Role.ASSISTANT, "", thought, (PastCall("call00001", "bash", _ARGUMENTS),))
    opened = _text(chat, _OPENING)
    begun, closed = map(re.escape, chat.traits.reasoning.marks)
    if thought and re.search(rf"{begun}\s*{closed}\s*\Z", opened):
        calling = replace(calling, reasoning=None)  # the prompt has closed it
    whole = _text(chat, [*_OPENING, calling, ChatMessage(Role.TOOL, "notes.txt", call_id="call00001")])
    start = common(whole, opened)
    last = whole.rfind(_ARGUMENTS["command"])
    begin, end = chat.traits.ends.find(whole[last:])
    return whole[start : last + end] if begin >= 0 else whole[start:]


def _text(chat: TransformersChatFormat, messages: Sequence[ChatMessage]) -> str:
    return "".join(chat.decode(piece.token_ids) for piece in chat.opening(messages, [TOOL]))


def _name(role: Role) -> str:
    return role.name.lower()
