"""`SingleReply`: what a model replied to one request, as the notes of a job of the task `sample` carry it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from ..errors import MalformedMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTE = "reply"
"""The names of its notes begin with this."""


class RepliedCall(msgspec.Struct, frozen=True, array_like=True):
    """A tool call."""

    call_id: str
    name: str
    arguments: str
    """As the model wrote them."""


class SingleReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reply; its tokens are in the job's trajectory."""

    text: str
    """Without reasoning, calls, the token that ended it and the text of `stop` that did."""
    finish_reason: Literal["stop", "tool_calls", "length"]
    prompt_text: str = ""
    """Of the prompt, if the request asked for it."""
    reasoning: str = ""
    calls: tuple[RepliedCall, ...] = ()
    stopped_by: str = ""
    """The text of `stop` that ended it; empty: none did."""
    cached_tokens: int = 0
    """Of the prompt, found in the engine's prefix cache."""
    reasoning_tokens: int = 0

    def notes(self, characters: int) -> dict[str, str]:
        """Return the reply as notes of at most so many characters each."""
        told = msgspec.json.encode(self).decode()
        starts = range(0, len(told), characters)
        return {f"{NOTE} {number}": told[start : start + characters] for number, start in enumerate(starts)}

    @classmethod
    def of(cls, notes: Mapping[str, str]) -> SingleReply:
        """Return the reply that notes have.

        Raises:
            MalformedMessage: they have none.
        """
        parts = (notes.get(f"{NOTE} {number}", "") for number in range(len(notes)))
        try:
            return msgspec.json.decode("".join(parts), type=cls)
        except msgspec.MsgspecError as error:
            raise MalformedMessage(f"the notes of the job hold no reply: {error}") from None
