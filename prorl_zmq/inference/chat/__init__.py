"""The interface between the agent loop and a model's chat template: messages in, token ids out.

Only new messages are tokenised. A `Conversation` returns the ids that open it, takes the policy's turns as the engine
generated them, and returns the ids between a turn and the next. If the template changes turns that the engine has seen
(many drop old reasoning), the prompt is marked as rewritten and holds the whole conversation.

Where another program leads the conversation (see `stages.harness`), there is a tree of turns and no `Conversation`: the
format returns the ids that open a conversation (`opening`), and those that follow any turn (`following`).

The package `renderers` is not used: its contents can spell control tokens, and it cannot extend the prompt of an
unknown template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...data.trajectory import Role
    from ..tool_calls.call import MalformedCall, ToolCall


class PastCall(NamedTuple):
    """A tool call in an earlier turn that the caller gives as context."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str
    reasoning: str | None = None
    calls: tuple[PastCall, ...] = ()
    """An assistant's tool calls."""
    call_id: str = ""
    """The call that a tool's answer belongs to."""


class Piece(NamedTuple):
    """Tokens of a prompt that belong to one turn."""

    role: Role
    token_ids: NDArray[np.int32]
    """int32 [M]"""
    new_turn: bool = True
    """False: they end the previous turn, such as the token after the policy's last."""


class Prompt(NamedTuple):
    """The tokens that the engine gets before the policy's next turn."""

    pieces: tuple[Piece, ...]
    """The last one opens the policy's turn."""
    rewritten: bool = False
    """The template changed what the engine saw: the pieces are the whole prompt, of a new segment. Otherwise they
    follow what the engine has seen and generated."""


class ReadTurn(NamedTuple):
    """A parsed turn of the policy."""

    reasoning: str | None
    text: str
    """The text after the reasoning, with its tool calls, without the token that ended the turn. Empty if the turn ended
    within its reasoning."""
    content: str
    """The text before its first call."""
    calls: tuple[ToolCall | MalformedCall, ...]
    """In order, without those in its reasoning."""
    ended: bool
    """Whether its last token is one that ends a turn."""
    ended_by: str = ""
    """That token, if it is known."""


class Conversation(Protocol):
    """One conversation under way: `prompt`, `add_turn`, what follows the turn, `prompt` and so on."""

    def prompt(self) -> Prompt:
        """Return the ids before the policy's next turn.

        Raises:
            InvalidJob: the template rejects the messages (`field` is `messages`).
        """

    def add_turn(self, generated: NDArray[np.int32]) -> ReadTurn:
        """Parse and append a turn of the policy, int32 [G], as the engine generated it.

        In a conversation without tools, a turn has no calls: what looks like one is part of its content.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """

    def add_tool_results(self, results: Sequence[str]) -> None:
        """Answer the last turn's tool calls, one text for each of its `calls`."""

    def add_messages(self, messages: Sequence[ChatMessage]) -> None:
        """Append messages of the user or the system after the last turn and the answers to its calls."""


class ChatFormat(Protocol):
    """Tokenizer and chat template of one model. Holds no state of a conversation, so all jobs share it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn of the policy."""

    @property
    def warning(self) -> str:
        """A limitation that users must know, such as that the model's tool calls are not parsed; empty: none."""

    def conversation(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> Conversation:
        """Begin a conversation.

        Args:
            messages: the opening; the policy answers the last one.
            tools: the JSON schemas of the policy's tools, from `Tool.schema`.
        """

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> tuple[Piece, ...]:
        """Return the ids of a whole conversation, with turns of the policy among its messages, and open its next turn.

        Raises:
            InvalidJob: the template rejects the messages (`field` is `messages`).
        """

    def read_turn(self, generated: NDArray[np.int32], tools: Sequence[dict[str, Any]] = ()) -> ReadTurn:
        """Parse a turn of the policy, int32 [G], as the engine generated it; the tools type the arguments of its calls.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """

    def following(
        self, turn: ReadTurn, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> tuple[Piece, ...]:
        """Return the ids that follow a turn of the policy, from the end of that turn to the opening of the next.

        Ids that the engine has seen are not repeated, even if the template would change them.

        Args:
            turn: the policy's turn.
            messages: the messages since. A tool's answer names a call of the turn by its number, from "0"; others are
                taken in order.
            tools: the JSON schemas of the policy's tools.

        Raises:
            InvalidJob: as `opening`.
        """

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text that is no message, int32 [N], as the model's tokenizer makes them.

        Tokens that the tokenizer begins a text with are included, and special tokens that the text spells are tokens.
        """

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of ids, special tokens included.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """
