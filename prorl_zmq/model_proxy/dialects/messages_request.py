"""Parse requests of Anthropic's Messages.

A user's message holds answers of tools and texts; each answer becomes a message, as do the texts after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...data.trajectory import Role
from ..calls import RequestCall
from .fields import arguments_text, error_text, invalid
from .history import History

if TYPE_CHECKING:
    from ..calls import RequestMessage

_BILLING: Final = "x-anthropic-billing-header:"
"""A line of the system prompt for Anthropic's accounts: other in sub-agents and after compaction, so left out."""


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    is_error: bool | None = None
    content: str | list[_Block] | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Thinking(msgspec.Struct):
    type: str = "disabled"


class MessagesBody(msgspec.Struct):
    """A request; to count tokens, the same."""

    messages: list[_Message]
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    model: str | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: _Thinking | None = None


def messages_of(asked: MessagesBody) -> tuple[RequestMessage, ...]:
    """Return the conversation.

    Raises:
        CallRefused: a message has an unknown role.
    """
    history = History()
    system = (
        [asked.system] if isinstance(asked.system, str) else [_text(block, history) for block in asked.system or ()]
    )
    if any(kept := [text for text in system if not text.startswith(_BILLING)]):
        history.say(Role.SYSTEM, "\n".join(kept))
    for index, message in enumerate(asked.messages):
        content = [_Block("text", message.content)] if isinstance(message.content, str) else message.content
        match message.role:
            case "assistant":
                _read_assistant(history, content)
            case "user":
                _read_user(history, content)
            case "system":
                history.say(Role.SYSTEM, "\n".join(_text(block, history) for block in content))
            case role:
                raise invalid(f"messages[{index}] has the role {role!r}; known are user, assistant and system")
    return history.messages


def _read_assistant(history: History, content: list[_Block]) -> None:
    text, reasoning = "", ""
    calls: list[RequestCall] = []
    ids: list[str | None] = []
    for block in content:
        match block.type:
            case "thinking":
                reasoning += block.thinking or ""
                ids.append(block.signature)
            case "redacted_thinking":
                ids.append(block.data)
            case "tool_use":
                calls.append(RequestCall(block.id or "", block.name or "", arguments_text(block.input)))
            case _:
                text += _text(block, history)
    history.assistant(text, reasoning, calls, ids)


def _read_user(history: History, content: list[_Block]) -> None:
    """Read answers of tools, each a message, and the texts between and after them."""
    said: list[str] = []
    for block in content:
        if block.type != "tool_result":
            said.append(_text(block, history))
            continue
        if said:
            history.say(Role.USER, "\n".join(said))
            said = []
        answer = block.content
        if isinstance(answer, list):
            answer = "\n".join(_text(part, history) for part in answer)
        answer = error_text(answer or "") if block.is_error else answer or ""
        history.answer(block.tool_use_id or "", answer)
    if said or not content:
        history.say(Role.USER, "\n".join(said))


def _text(block: _Block, history: History) -> str:
    if block.type == "tool_reference":
        return block.tool_name or ""
    return block.text or "" if block.type == "text" else history.placeholder(block.type)
