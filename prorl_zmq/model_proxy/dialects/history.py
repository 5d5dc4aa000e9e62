"""Reading a conversation: pieces of one turn, however the API splits it, become one message again.

A turn of the policy comes back as one message, as blocks of it, or as items in a row, with answers of tools between
them where a harness runs each call at once. Pieces belong together if they follow each other, or name the same turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...data.trajectory import Role
from ..calls import RequestMessage, turn_ids_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..calls import RequestCall

ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "model": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}


class History:
    """The messages of a request, as they are read."""

    def __init__(self) -> None:
        self._messages: list[RequestMessage] = []

    @property
    def messages(self) -> tuple[RequestMessage, ...]:
        """All so far."""
        return tuple(self._messages)

    def say(self, role: Role, text: str) -> None:
        """Add a message of a user or the system."""
        self._messages.append(RequestMessage(role, text))

    def answer(self, call_id: str, text: str, name: str = "") -> None:
        """Add a tool's answer."""
        self._messages.append(RequestMessage(Role.TOOL, text, call_id=call_id, name=name))

    def assistant(
        self, text: str = "", reasoning: str = "", calls: Iterable[RequestCall] = (), ids: Iterable[str | None] = ()
    ) -> None:
        """Add a turn of the policy, or a piece of one; `ids` are all that it has, those of the calls aside."""
        calls = tuple(calls)
        turn_ids = turn_ids_in([*filter(None, ids), *(call.call_id for call in calls)])
        index = self._turn(turn_ids)
        if index is None:
            self._messages.append(RequestMessage(Role.ASSISTANT, text, reasoning, calls, turn_ids=turn_ids))
            return
        turn = self._messages[index]
        self._messages[index] = replace(
            turn,
            text=turn.text + text,
            reasoning=turn.reasoning + reasoning,
            calls=turn.calls + calls,
            turn_ids=tuple(dict.fromkeys(turn.turn_ids + turn_ids)),
        )

    def _turn(self, turn_ids: tuple[str, ...]) -> int | None:
        """Find the message that a piece belongs to."""
        for index in reversed(range(len(self._messages))):
            message = self._messages[index]
            if message.role == Role.ASSISTANT:
                unnamed = not (turn_ids and message.turn_ids)
                last = index == len(self._messages) - 1
                return index if (unnamed and last) or set(turn_ids) & set(message.turn_ids) else None
            if message.role != Role.TOOL:
                return None
        return None
