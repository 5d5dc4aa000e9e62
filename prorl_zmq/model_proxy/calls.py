"""A call of the model, independent of the HTTP API.

A dialect (`dialect.Dialect`) parses a request's body into a `ModelRequest`, and writes a `ModelReply` in its API's
form. A `Model` turns one into the other: it holds the conversation as token ids, and the engine. The server (`server`)
knows neither. Each reply has a turn id, which is part of all ids in the API's form (tool calls, items, messages,
signatures), so a harness that sends the turn back identifies it, even if it changed the text.

The package `llm-rosetta` converts between the same APIs; it is not used, because it drops the turn ids and replaces the
errors that harnesses look for.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..wire.messages.jobs import MAIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from ..data.trajectory import Role

TURN_ID = re.compile(r"prt[0-9a-f]{16}")
"""What all ids of a reply hold."""

FinishReason = Literal["stop", "tool_calls", "length"]


def new_turn_id() -> str:
    """Return an id of a captured turn, which no text holds by chance."""
    return f"prt{secrets.token_hex(8)}"


def turn_ids_in(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the turns that ids name, in order, each once."""
    return tuple(dict.fromkeys(found for text in texts for found in TURN_ID.findall(text)))


@dataclass(frozen=True, slots=True)
class RequestCall:
    """A tool call in a conversation's history, as the harness sent it back."""

    call_id: str
    name: str
    arguments: str
    """JSON text; what the harness sent as an object is written as JSON."""


@dataclass(frozen=True, slots=True)
class RequestMessage:
    """One message of a conversation."""

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[RequestCall, ...] = ()
    """Of an assistant."""
    call_id: str = ""
    """The call that a tool's answer belongs to."""
    name: str = ""
    """The tool that answered, where the API says it."""
    turn_ids: tuple[str, ...] = ()
    """Of an assistant: the captured turns that its ids name (see `turn_ids_in`)."""
    left_out: int = 0
    """Images and other contents that the policy cannot read; the text has a placeholder for each."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a harness asks of the model."""

    messages: tuple[RequestMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """In the form of chat completions, each with a name of its own: `{"type": "function", "function": {...}}`."""
    may_call: bool = True
    """False: the reply is text, whatever the policy writes (`tool_choice: none`)."""
    model: str = ""
    """The name that the harness asked for; the policy answers all names but those that the job maps to others."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the turn."""
    stream: bool = False
    sampling: dict[str, float] = field(default_factory=dict)
    """What else was asked of the sampling (`temperature`, `top_p`). The job's own sampling holds; this is counted."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the HTTP request, with names in lower case: harnesses tell in them which agent is calling."""
    conversation: str = MAIN
    """The name that the program gives the call's conversation."""
    extra: Any = None
    """What the dialect needs to write the reply."""


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A tool call of the policy."""

    call_id: str
    """Holds the turn id; goes out as it is."""
    name: str
    arguments: str
    """As the policy wrote them: JSON text, or what should have been."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call."""

    prompt: int
    cached: int = 0
    """Of the prompt, found in the engine's prefix cache."""
    generated: int = 0
    reasoning: int = 0
    """Of those generated."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelReply:
    """A turn of the policy, as the engine generated it."""

    turn_id: str
    text: str
    """Without reasoning and calls, and without the text of `stop` that ended the turn."""
    reasoning: str
    calls: tuple[ReplyCall, ...]
    finish_reason: FinishReason
    usage: Usage
    prompt_token_ids: NDArray[np.int32]
    """int32 [P]: the whole prompt."""
    token_ids: NDArray[np.int32]
    """int32 [G]"""
    logprobs: NDArray[np.float32]
    """float32 [G]"""
    stopped_by: str = ""
    """The text of the request's `stop` that ended the turn; empty if none did."""
    top_ids: NDArray[np.int32] | None = None
    """int32 [G, K]: the likeliest tokens in place of each, the likeliest first; -1 where fewer could be drawn."""
    top_logprobs: NDArray[np.float32] | None = None
    """float32 [G, K]"""


class Problem(StrEnum):
    """Why a call is refused; each API has its own status and words for it."""

    INVALID = "invalid_request"
    """The request is wrong."""
    TOO_LARGE = "too_large"
    """The body is larger than the proxy takes."""
    CONTEXT_LENGTH = "context_length"
    """The prompt leaves no room for an answer: the harness may shorten it."""
    OVER = "over"
    """The rollout is over, or has not begun: nothing more will be answered."""
    BUSY = "busy"
    """Too many calls of this rollout at one time; a later try may succeed."""
    FAILED = "failed"
    """The engine failed; a later try may succeed."""
    NOT_ALLOWED = "not_allowed"
    """The call does not show the rollout's key."""
    NOT_FOUND = "not_found"
    """No such path."""
    INTERNAL = "internal"
    """The proxy itself failed; its log says why."""


class CallRefused(Exception):
    """A call that gets an error instead of a reply.

    Args:
        problem: what kind.
        message: for people, and for harnesses that read it.
        tokens: of the prompt, for `CONTEXT_LENGTH`.
        limit: most tokens of a prompt, for `CONTEXT_LENGTH`.
    """

    def __init__(self, problem: Problem, message: str, *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.problem = problem
        self.message = message
        self.tokens = tokens
        self.limit = limit


class OpenCall(Protocol):
    """A call under way. The server closes it on every path."""

    @property
    def turn_id(self) -> str:
        """Of the reply that will come."""

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt."""

    async def reply(self) -> ModelReply:
        """Return the policy's turn. Cancelling ends the generation.

        Raises:
            CallRefused: the engine failed, or the rollout has ended.
        """

    def close(self, *, delivered: bool) -> None:
        """Say whether the harness got the whole reply; otherwise it will ask again."""


class Model(Protocol):
    """What answers the calls of one rollout."""

    @property
    def name(self) -> str:
        """What the policy is called in replies."""

    @property
    def refusal_status(self) -> int:
        """The HTTP status of `Problem.OVER` that this harness stops at: 400 or 403."""

    def charge(self, cost: int) -> None:
        """Charge the rollout for a body, before it is decoded: bytes, and what its values cost besides.

        Raises:
            CallRefused: the rollout is over, or has sent more than it may, and is over with that.
        """

    async def open(self, request: ModelRequest) -> OpenCall:
        """Take a call; the prompt is known when this returns, and nothing has been generated.

        Raises:
            CallRefused: it is not taken.
        """

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the tokens of the prompt that a call would have; nothing is kept of it.

        Raises:
            CallRefused: the request is wrong.
        """
