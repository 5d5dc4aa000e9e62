"""Messages in the form that a chat template takes, with turns of the policy and tools' answers among them.

Templates are strict: some accept only call ids of nine letters or digits, some no two messages of one role in a row,
some only a leading system message. So ids are converted to accepted ones; `forms` has alternatives of rejected
messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...data.trajectory import Role
from .traits import WrittenCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from . import ChatMessage
    from .template import Message
    from .traits import TemplateTraits

UNKNOWN_TOOL = "unknown"
"""The tool's name in the answer to an unknown call."""
_ROLES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant", Role.TOOL: "tool"}


class History(NamedTuple):
    """Messages for a template, and their roles."""

    messages: list[Message]
    roles: list[Role]


def history(
    messages: Sequence[ChatMessage], traits: TemplateTraits, answered: Mapping[str, WrittenCall] | None = None
) -> History:
    """Return messages in the form that a template takes.

    Args:
        messages: the messages.
        traits: of the template.
        answered: the calls of the turn before the messages, by the ids that tools' answers name them with.
    """
    written: list[Message] = []
    roles: list[Role] = []
    known = dict(answered or {})
    open_calls = list(known.values())
    number = len(open_calls)
    for message in messages:
        if message.role == Role.TOOL:
            call = known.get(message.call_id) or (open_calls[0] if open_calls else None)
            if call in open_calls:
                open_calls.remove(call)
            if roles[-1:] == [Role.TOOL] and not traits.takes_results:
                written[-1]["content"] += f"\n\n{message.content}"
                continue
            call = call or WrittenCall(UNKNOWN_TOOL, {}, traits.call_id(number := number + 1, UNKNOWN_TOOL))
            written += traits.results([message.content], [call])
        elif message.role == Role.ASSISTANT:
            open_calls.clear()
            for past in message.calls:
                number += 1
                call = known[past.call_id] = WrittenCall(past.name, past.arguments, traits.call_id(number, past.name))
                open_calls.append(call)
            content = message.content
            if message.calls and not traits.writes_calls:
                content += "".join(traits.form.write(call.name, call.arguments) for call in open_calls)
            calls = open_calls if traits.writes_calls else ()
            written.append(traits.turn(content, message.reasoning or None, calls))
        else:
            written.append({"role": _ROLES[message.role], "content": message.content})
        roles.append(message.role)
    return History(written, roles)
