"""`MessageTexts`: extracts message contents and tool calls from the tokens of a trajectory.

The text that a chat template puts around a message is learned by rendering a message with known content. A message that
does not have this text around it is returned whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..data.trajectory import Role
from ..errors import ProrlError
from ..evaluation.transcript import TextReader
from ..inference.chat import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..evaluation.transcript import Call
    from ..inference.chat import ChatFormat, Prompt
    from ..wire.messages.backends import ChatSettings

MARK = "the content of a message"


class MessageTexts:
    """The message texts of one model.

    Args:
        chat: the model's chat format.
        settings: its backend's.
        tools: schemas of the conversation's tools, which templates render into a message.
    """

    def __init__(self, chat: ChatFormat, settings: ChatSettings, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._chat = chat
        self._tools = tools
        self.reader = TextReader(chat, settings)
        self._around: dict[Role, tuple[str, str]] = {}
        """The template's text before and after a message, by role."""
        system, user = ChatMessage(Role.SYSTEM, MARK), ChatMessage(Role.USER, MARK)
        for opening in ([user], [system, user]):
            try:
                self._learn(chat.conversation(opening, tools).prompt())
            except ProrlError:
                continue  # a template without a system message

    def said(self, generated: NDArray[np.int32]) -> tuple[str, tuple[Call, ...]]:
        """Return the text of a policy's turn before its calls, and the calls."""
        ended = len(generated) > 0 and int(generated[-1]) in self._chat.stop_token_ids
        text = self.reader.text(generated[:-1] if ended else generated)
        return self.reader.before_calls(text), self.reader.calls(text)

    def content(self, role: Role, token_ids: NDArray[np.int32], after: NDArray[np.int32] | None = None) -> str:
        """Return the content of a message that is not the policy's; `after` is the turn that a tool answers."""
        if role == Role.TOOL and role not in self._around and after is not None:
            self._learn_tool(after)
        before, behind = self._around.get(role, ("", ""))
        text = self.reader.text(token_ids)
        if text.startswith(before) and text.endswith(behind):
            return text[len(before) : len(text) - len(behind)]
        return text

    def _learn_tool(self, turn: NDArray[np.int32]) -> None:
        self._around[Role.TOOL] = ("", "")
        try:
            conversation = self._chat.conversation([ChatMessage(Role.USER, MARK)], self._tools)
            conversation.prompt()
            calls = conversation.add_turn(turn).calls
            conversation.add_tool_results([MARK] * len(calls))
            self._learn(conversation.prompt())
        except ProrlError:
            return

    def _learn(self, prompt: Prompt) -> None:
        for piece in prompt.pieces:
            before, mark, behind = self.reader.text(piece.token_ids).partition(MARK)
            if mark and MARK not in behind:
                self._around[piece.role] = (before, behind)
