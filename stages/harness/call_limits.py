"""The limits on the calls of one rollout: their size, number and cost, and when the rollout is over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from ...model_proxy.calls import CallRefused, Problem
from ...wire.json_bounds import json_values
from ...wire.messages.base import CONVERSATIONS_LIMIT, Identifier
from ..episode import UNLIMITED, StopReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...model_proxy.calls import ModelRequest, RequestMessage
    from ..episode import JobPolicy

CALLS_AT_ONCE = 16
"""Calls of one rollout that are answered at the same time."""
CALLS_PER_TURN, FURTHER_CALLS = 20, 200
"""Most calls of a rollout, answered or not, since each costs work: per turn, and in addition."""
TOKEN_CHARACTERS = 32
"""More than the average token of any text: longer requests are rejected unread."""
TOOLS, STOPS, STOP_CHARACTERS = 512, 16, 256
"""Most tools and stop texts of a call, and the longest stop text."""
ARGUMENT_VALUES = 200_000
"""Most JSON values in the arguments of all calls in a request's history, which are decoded again."""
MESSAGE_CHARACTERS = 32
"""The cost of a message in addition to its text."""
BYTES, BYTES_PER_TURN = 64 * 2**20, 4 * 2**20
"""The total cost of a rollout's bodies (see `model_proxy.calls.Model.charge`): programs send their whole history with
each call, some hundred kilobytes of it."""
LINES = 100
"""Most lines of calls of a rollout; each repeats its history in the trajectory."""


class CallLimits:
    """Counts the calls of one rollout in the policy's episode, and rejects those beyond the job's limits."""

    def __init__(self, policy: JobPolicy) -> None:
        context, limit = policy.context_tokens or UNLIMITED, policy.job.episode.max_tokens
        self.tokens = min(limit, context)
        """Most tokens of a prompt and its answer."""
        self.limited_by = StopReason.MAX_TOKENS if limit <= context else StopReason.CONTEXT_LENGTH
        self.over = asyncio.Event()
        """Set with the first call that is rejected because the rollout is over."""
        self.exceeded = False
        """Whether the programs sent more than a rollout may."""
        self.too_long: CallRefused | None = None
        """The last call that was rejected as too long."""
        self._job = policy.job
        self._episode = policy.episode
        self._conversations: set[str] = set()
        self._in_flight = self._turns = self._calls = self._lines = self._cost = 0

    @property
    def cost(self) -> int:
        """The limit on the cost of all bodies."""
        return BYTES + BYTES_PER_TURN * self._job.episode.max_turns

    def charge(self, cost: int) -> None:
        """Charge the rollout for a body; raise `CallRefused` if that is too much, or the rollout is over."""
        self._cost += cost
        if self._cost > self.cost:
            self.exceeded = True
            self.over.set()
        self.check_not_over(": its turns, or the bytes that it may send, are used up")

    def check_not_over(self, why: str = "") -> None:
        if self.over.is_set():
            raise CallRefused(Problem.OVER, f"the rollout is over{why}")

    def check_call(self) -> None:
        """Count a call, and raise `CallRefused` if it is one too many."""
        self._calls += 1
        max_turns = self._job.episode.max_turns
        if self._turns >= max_turns or self._calls > CALLS_PER_TURN * max_turns + FURTHER_CALLS or self._lines > LINES:
            self._episode.stop_reason = StopReason.MAX_TURNS
            self.over.set()
        self.check_not_over(": its turns are used up")
        if self._in_flight >= CALLS_AT_ONCE:
            self._episode.metrics["calls_refused_as_too_many"] += 1
            message = f"{CALLS_AT_ONCE} calls of this rollout are being answered; try again later"
            raise CallRefused(Problem.BUSY, message)

    def check_request(self, request: ModelRequest) -> None:
        """Raise `CallRefused` for a request that no engine would accept."""
        stops = STOPS - len(self._job.sampling.stop)
        if len(request.stop) > stops or not all(0 < len(text) <= STOP_CHARACTERS for text in request.stop):
            message = f"stop takes up to {stops} texts of 1 to {STOP_CHARACTERS} characters each"
            raise CallRefused(Problem.INVALID, message)
        try:
            name = msgspec.convert(request.conversation, Identifier)
        except msgspec.ValidationError as error:
            message = f"a conversation cannot be named {request.conversation!r:.150}: {error}"
            raise CallRefused(Problem.INVALID, message) from None
        if name not in self._conversations and len(self._conversations) >= CONVERSATIONS_LIMIT:
            raise CallRefused(Problem.INVALID, f"a rollout has at most {CONVERSATIONS_LIMIT} conversations")
        if len(request.tools) > TOOLS:
            raise CallRefused(Problem.INVALID, f"there are {len(request.tools)} tools; at most {TOOLS} are taken")
        arguments = [call.arguments for message in request.messages for call in message.calls]
        if sum(map(len, arguments)) > ARGUMENT_VALUES:  # there are no more values than characters
            encoded = (text.encode(errors="replace") for text in arguments)
            if sum(json_values(text, ARGUMENT_VALUES) for text in encoded) > ARGUMENT_VALUES:
                message = f"the calls have arguments of more than {ARGUMENT_VALUES} values, which is the most"
                raise CallRefused(Problem.INVALID, message)
        if (characters := text_size(request.messages, request.tools)) > TOKEN_CHARACTERS * self.tokens:
            raise self._too_long(characters // TOKEN_CHARACTERS)

    def room(self, prompt_tokens: int) -> int:
        """Return the most tokens of an answer to a prompt; raise `CallRefused` if there is no room."""
        if prompt_tokens >= self.tokens:
            raise self._too_long(prompt_tokens)
        return self.tokens - prompt_tokens

    def opened(self, conversation: str, *, new_line: bool) -> None:
        """Count an accepted call of a conversation, which will be a turn."""
        self._conversations.add(conversation)
        self._lines += new_line
        self._in_flight += 1
        self._turns += 1

    def ended(self, *, was_turn: bool) -> None:
        """Note that an opened call is over; a call that never reached the engine is not a turn."""
        self._in_flight -= 1
        self._turns -= not was_turn

    def note_too_long(self, refused: CallRefused) -> None:
        """Record a rejected call, if it was too long."""
        if refused.problem == Problem.CONTEXT_LENGTH:
            self._episode.metrics["calls_refused_as_too_long"] += 1
            self.too_long = refused

    def _too_long(self, tokens: int) -> CallRefused:
        message = f"the prompt has {tokens} tokens, and the limit is {self.tokens} with the answer"
        return CallRefused(Problem.CONTEXT_LENGTH, message, tokens=tokens, limit=self.tokens)


def text_size(messages: Sequence[RequestMessage], tools: Sequence[dict[str, Any]]) -> int:
    """Return roughly the characters that the policy would read."""
    texts = sum(len(message.text) + len(message.reasoning) + MESSAGE_CHARACTERS for message in messages)
    calls = sum(len(call.arguments) for message in messages for call in message.calls)
    return texts + calls + len(msgspec.json.encode(tools))
