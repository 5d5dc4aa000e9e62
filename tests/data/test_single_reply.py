from __future__ import annotations

import pytest

from prorl_zmq.data.single_reply import RepliedCall, SingleReply
from prorl_zmq.errors import MalformedMessage

REPLY = SingleReply(
    text='"ä\n' * 9, finish_reason="tool_calls", calls=(RepliedCall("a", "add", "{}"),), cached_tokens=3
)


@pytest.mark.parametrize("characters", [1, 7, 1000])
def test_a_reply_is_read_from_its_notes_among_others(characters: int) -> None:
    notes = REPLY.notes(characters)
    assert max(map(len, notes.values())) <= characters
    assert SingleReply.of({"calls": "1 begins", **dict(reversed(notes.items()))}) == REPLY


@pytest.mark.parametrize("notes", [{}, {"calls": "1"}, {"reply 1": "{}"}, {"reply 0": '{"text":"a"}'}])
def test_notes_without_a_whole_reply_are_malformed(notes: dict[str, str]) -> None:
    with pytest.raises(MalformedMessage, match="hold no reply"):
        SingleReply.of(notes)
