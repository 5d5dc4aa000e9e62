"""The interface between the agent loop and a model's chat template: messages in, token ids out.

Only new messages are tokenised. A `Conversation` returns the ids that open it, takes the policy's turns as the engine
generated them, and returns the ids between a turn and the next. If the template changes turns that the engine has seen
(many drop old reasoning), the prompt is marked as rewritten and holds the whole conversation.

Where another program leads the conversation (see `stages.harness`), there is a tree of turns and no `Conversation`: the
format returns the ids that open a conversation (`opening`), and those that follow any turn (`following`).

The package `renderers` renders some model families too. It is not used, because its contents can spell control tokens,
and because it cannot extend the prompt of a template that it does not know.
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
    """Of an assistant."""
    call_id: str = ""
    """Of a tool's answer: what it answers."""


class Piece(NamedTuple):
    """Tokens of a prompt that belong to one turn."""

    role: Role
    token_ids: NDArray[np.int32]
    """int32 [M]"""
    new_turn: bool = True
    """False: they end the turn before, such as the token after the policy's last."""


class Prompt(NamedTuple):
    """What the engine is to see before the policy's next turn."""

    pieces: tuple[Piece, ...]
    """The last one opens the policy's turn."""
    rewritten: bool = False
    """The template changed what the engine saw: the pieces are the whole prompt, of a new segment. Otherwise they
    follow what the engine has seen and generated."""


class PolicyTurn(NamedTuple):
    """What the policy said."""

    text: str
    """What follows its reasoning, with its tool calls; the token that ended the turn is left out. Empty if the turn
    ended before its reasoning did."""
    calls: tuple[ToolCall | MalformedCall, ...]
    """In order, without those in its reasoning."""


class ReadTurn(NamedTuple):
    """A turn of the policy, taken apart."""

    reasoning: str | None
    text: str
    """What follows the reasoning, without the token that ended the turn."""
    content: str
    """The text before its first call."""
    calls: tuple[ToolCall | MalformedCall, ...]
    ended: bool
    """Its last token is one that ends a turn."""
    ended_by: str = ""
    """That token, as far as it is known."""


class Conversation(Protocol):
    """One conversation under way. The calls alternate: `prompt`, `add_turn`, `add_tool_results`, `prompt` and so on."""

    def prompt(self) -> Prompt:
        """Return the ids before the policy's next turn.

        Raises:
            InvalidJob: the template refuses the messages (`field` is `messages`).
        """

    def add_turn(self, generated: NDArray[np.int32]) -> PolicyTurn:
        """Take a turn of the policy, int32 [G], as the engine generated it, and read it.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """

    def add_tool_results(self, results: Sequence[str]) -> None:
        """Answer the last turn's tool calls, one text for each of its `calls`."""


class ChatFormat(Protocol):
    """Tokenizer and chat template of one model. Has no state of any conversation, so that all jobs share it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn of the policy."""

    @property
    def warning(self) -> str:
        """What its users must know, such as that the model's tool calls are not read; empty: nothing."""

    def conversation(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> Conversation:
        """Begin a conversation.

        Args:
            messages: its opening; the last one is what the policy answers.
            tools: the JSON schemas of what the policy may call, as `Tool.schema` gives them.
        """

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> tuple[Piece, ...]:
        """Return the ids of a whole conversation, turns of the policy among its messages; the last opens its next turn.

        Raises:
            InvalidJob: the template refuses the messages (`field` is `messages`).
        """

    def read_turn(self, generated: NDArray[np.int32], tools: Sequence[dict[str, Any]] = ()) -> ReadTurn:
        """Read a turn of the policy, int32 [G], as the engine generated it; the tools type the arguments of its calls.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """

    def following(
        self, turn: ReadTurn, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> tuple[Piece, ...]:
        """Return the ids that follow a turn of the policy, from the end of that turn to the opening of the next.

        What the engine has seen is not repeated, even if the template would change it.

        Args:
            turn: what the policy said.
            messages: what came since. A tool's answer names a call of the turn by its number, from "0"; others are
                taken in order.
            tools: what the policy may call.

        Raises:
            InvalidJob: as `opening`.
        """

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of ids, special tokens included.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """
