"""Join the pieces into which an API splits one turn of the conversation.

A turn of the policy may come back as one message, as blocks, or as a sequence of items, with tools' answers in between
if a harness runs each call at once. Pieces belong together if they are adjacent, or have the same turn id.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ...data.trajectory import Role
from ..calls import RequestMessage, turn_ids_in
from .common import invalid

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


KIND_CHARACTERS = 32
"""Of the kind of a content that is left out, which the program names."""
PIECES = 20_000
"""Of one conversation; a harness that runs for days has some thousands."""


class _Turn:
    """A turn of the policy, as far as its pieces have come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[RequestCall] = []
        self.turn_ids: dict[str, None] = {}
        self.left_out = 0

    def message(self) -> RequestMessage:
        text, reasoning = "".join(self.texts), "".join(self.reasoning)
        calls, turn_ids = tuple(self.calls), tuple(self.turn_ids)
        return RequestMessage(Role.ASSISTANT, text, reasoning, calls, turn_ids=turn_ids, left_out=self.left_out)


class History:
    """The messages of a request, as they are read; in time that is linear in their pieces.

    Raises:
        CallRefused: there are more than `PIECES`.
    """

    def __init__(self) -> None:
        self._messages: list[RequestMessage | _Turn] = []
        self._pieces = self._left_out = 0
        self._turn: _Turn | None = None
        """The last turn, while only answers of tools have followed it."""
        self._is_last = False
        """Nothing has followed it."""

    @property
    def messages(self) -> tuple[RequestMessage, ...]:
        """All so far; the answers to a turn's calls are in the order of these calls."""
        messages = [one.message() if isinstance(one, _Turn) else one for one in self._messages]
        turns = [index for index, message in enumerate(messages) if message.role == Role.ASSISTANT]
        for start, end in pairwise([*turns, len(messages)]):
            _order_answers(messages, start, end)
        return tuple(messages)

    def placeholder(self, kind: str) -> str:
        """Return the text that stands for a content that the policy cannot read; the next piece counts it."""
        self._left_out += 1
        return f"[{kind[:KIND_CHARACTERS]} left out: the policy reads text only]"

    def say(self, role: Role, text: str) -> None:
        """Add a message of a user or the system."""
        self._turn = None
        self._add(RequestMessage(role, text, left_out=self._taken()))

    def answer(self, call_id: str, text: str, name: str = "") -> None:
        """Add a tool's answer."""
        self._is_last = False
        self._add(RequestMessage(Role.TOOL, text, call_id=call_id, name=name, left_out=self._taken()))

    def assistant(
        self, text: str = "", reasoning: str = "", calls: Iterable[RequestCall] = (), ids: Iterable[str | None] = ()
    ) -> None:
        """Add a turn of the policy, or a piece of one; `ids` are all that it has, those of the calls aside."""
        calls = tuple(calls)
        turn_ids = turn_ids_in([*filter(None, ids), *(call.call_id for call in calls)])
        turn = self._turn
        same = turn is not None and not turn.turn_ids.keys().isdisjoint(turn_ids)
        unnamed = turn is not None and not (turn_ids and turn.turn_ids)
        if turn is None or not (same or (unnamed and self._is_last)):
            turn = self._turn = _Turn()
            self._is_last = True
            self._add(turn)
        else:
            self._count()
        turn.left_out += self._taken()
        turn.texts.append(text)
        turn.reasoning.append(reasoning)
        turn.calls += calls
        turn.turn_ids.update(dict.fromkeys(turn_ids))

    def _taken(self) -> int:
        """Return how many contents were left out since the last piece."""
        left_out, self._left_out = self._left_out, 0
        return left_out

    def _add(self, one: RequestMessage | _Turn) -> None:
        self._count()
        self._messages.append(one)

    def _count(self) -> None:
        self._pieces += 1
        if self._pieces > PIECES:
            raise invalid(f"the conversation has more than {PIECES} parts, which is the most that is taken")


def _order_answers(messages: list[RequestMessage], start: int, end: int) -> None:
    """Put the tools' answers that stand behind a turn, up to `end`, in the order of its calls.

    Programs send the answers to parallel calls as they come, and many templates show no ids: the policy would take one
    answer for another. An answer without an id belongs to the next call that no other answer names.
    """
    numbers = {call.call_id: number for number, call in enumerate(messages[start].calls) if call.call_id}
    places = [
        place
        for place in range(start + 1, end)
        if messages[place].role == Role.TOOL and (not messages[place].call_id or messages[place].call_id in numbers)
    ]
    named = {numbers[messages[place].call_id] for place in places if messages[place].call_id}
    free = iter([number for number in range(len(messages[start].calls)) if number not in named])
    order = {place: numbers.get(messages[place].call_id, -1) for place in places}
    order |= {place: next(free, len(numbers)) for place in places if order[place] < 0}
    answers = [messages[place] for place in sorted(places, key=order.__getitem__)]
    for place, answer in zip(places, answers, strict=True):
        messages[place] = answer
