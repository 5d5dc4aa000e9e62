"""The agent loop: prompt, generate, call tools, repeat. Token ids in, token ids out.

Only new messages are tokenised; generated ids are appended unchanged. If the chat template rewrites earlier turns, the
next prompt begins a new segment of the trajectory.
"""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.trajectory import Role
from ..errors import InvalidJob
from ..inference.chat import ChatMessage
from ..inference.tool_calls.call import MalformedCall, ToolCall
from ..metrics.catalog import TOOL_SECONDS
from ..system.traces import span
from ..tools.tool import AnyTool, ToolArgumentsInvalid
from .episode import UNLIMITED, StopReason
from .turn_sampler import TurnSampler, version_per_token

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from ..inference.chat import PolicyTurn, Prompt
    from ..inference.engine import Generation
    from .episode import JobPolicy

LONG_TEXT = 32 * 1024
"""Characters from which on a text is tokenised in a thread."""


class _Budget(NamedTuple):
    """The tokens that still fit, and the limit that they end at."""

    tokens: int
    limit: StopReason


def check_opening(messages: Any, tools: Any) -> None:
    """Check the opening messages that a handler passes to `phase.converse`.

    Raises:
        TypeError: a value has the wrong type.
    """
    if isinstance(messages, str | ChatMessage):
        raise TypeError(f"messages must be a list, such as [ChatMessage(Role.USER, …)], and not {messages!r:.100}")
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise TypeError(f"a message must be a ChatMessage(Role.USER, …), and not {message!r:.100}")
        if not isinstance(message.role, Role):
            raise TypeError(f"a message's role must be a prorl_zmq.Role, such as Role.USER, and not {message.role!r}")
        if not isinstance(message.content, str):
            raise TypeError(f"a message's content must be a text, and not {message.content!r:.100}")
    for tool in tools:
        if isinstance(tool, type) or not isinstance(tool, AnyTool):
            raise TypeError(f"a tool must be an object of a class derived from Tool, and not {tool!r:.100}")


class AgentLoop:
    """One conversation of a policy with its tools."""

    def __init__(
        self, policy: JobPolicy, tools: Sequence[AnyTool], more: MutableMapping[str, AnyTool] | None = None
    ) -> None:
        self.episode = policy.episode
        self.chat, self.sampling, self.limits = policy.chat, policy.job.sampling, policy.job.episode
        self.context_tokens = policy.context_tokens or UNLIMITED
        own: dict[str, AnyTool] = {tool.name: tool for tool in tools}
        self._tools: Mapping[str, AnyTool] = (
            ChainMap(own, more) if more is not None else own
        )  # more tools may come during the conversation
        self._trajectory = self.episode.trajectory
        self._sampler = TurnSampler(policy, self.sampling)

    async def run(self, messages: Sequence[ChatMessage]) -> StopReason:
        self.episode.stop_reason = await self._turns(messages)
        return self.episode.stop_reason

    async def _turns(self, messages: Sequence[ChatMessage]) -> StopReason:
        conversation = self.chat.conversation(messages, [tool.schema() for tool in self._tools.values()])
        new = sum(len(message.content) for message in messages)
        for turn in range(self.limits.max_turns):
            with span("turn", {"prorl.turn": turn}):
                started = time.monotonic()
                # Tokenising megabytes takes seconds, which would block the event loop.
                prompt = await asyncio.to_thread(conversation.prompt) if new > LONG_TEXT else conversation.prompt()
                room = self._add(prompt)
                self.episode.spent("chat", started)
                if room.tokens < 1:
                    if not turn:
                        raise self._no_room(prompt, room)
                    return room.limit
                generation = await self._sampler.sample(self._trajectory.prompt(), room.tokens, turn, self._append)
                started = time.monotonic()
                said = conversation.add_turn(generation.token_ids)
                self.episode.last_text = said.text
                self.episode.spent("chat", started)
                stop_reason = self._stop_reason(generation, room, said)
                if stop_reason is not None:
                    return stop_reason
                results = await self._results(said)
                if results is None:
                    return StopReason.FINISHED
                conversation.add_tool_results(results)
                new = sum(map(len, results))
        return StopReason.MAX_TURNS

    def _add(self, prompt: Prompt) -> _Budget:
        """Append a prompt if that leaves room for a token of the policy; return that budget."""
        before = 0 if prompt.rewritten else self._trajectory.segment_tokens
        room = self._budget(before + sum(len(piece.token_ids) for piece in prompt.pieces))
        if room.tokens > 0:
            if prompt.rewritten:
                self._trajectory.begin_segment()
            for piece in prompt.pieces:
                if piece.new_turn:
                    self._trajectory.begin_turn(piece.role)
                self._trajectory.add_context(piece.token_ids)
        return room

    def _budget(self, tokens: int) -> _Budget:
        """Return what still fits after `tokens` tokens of a segment."""
        if self.limits.max_tokens <= self.context_tokens:
            return _Budget(self.limits.max_tokens - tokens, StopReason.MAX_TOKENS)
        return _Budget(self.context_tokens - tokens, StopReason.CONTEXT_LENGTH)

    def _no_room(self, prompt: Prompt, room: _Budget) -> InvalidJob:
        tokens = sum(len(piece.token_ids) for piece in prompt.pieces)
        if room.limit == StopReason.MAX_TOKENS:
            what, name = f"episode.max_tokens ({self.limits.max_tokens})", "episode.max_tokens"
        else:
            what, name = f"the engine's context ({self.context_tokens} tokens)", "messages"
        return InvalidJob(f"the opening messages, {tokens} tokens, leave no room in {what}", field=name)

    def _append(self, turn_so_far: Generation, start: int) -> None:
        versions = version_per_token(turn_so_far)
        ids, logprobs = turn_so_far.token_ids[start:], turn_so_far.logprobs[start:]
        self._trajectory.add_generated(ids, logprobs, versions[start:])

    def _stop_reason(self, generation: Generation, room: _Budget, said: PolicyTurn) -> StopReason | None:
        """Return why the episode stops after this turn; None: it continues with tool calls."""
        if generation.finish_reason != "length":
            return None if said.calls else StopReason.DONE
        if len(generation.token_ids) >= room.tokens:
            return room.limit
        full = len(generation.token_ids) >= self.sampling.max_tokens
        return StopReason.TURN_LENGTH if full else StopReason.CONTEXT_LENGTH

    async def _results(self, said: PolicyTurn) -> list[str] | None:
        """Answer a turn's tool calls; return None if one of them ended the episode."""
        results: list[str] = []
        for call in said.calls:
            results.append(await self._answer(call))
            if self.episode.final_message is not None:
                return None
        return results

    async def _answer(self, call: ToolCall | MalformedCall) -> str:
        if isinstance(call, MalformedCall):
            self.episode.metrics["malformed_tool_calls"] += 1
            return call.feedback
        self.episode.metrics["tool_calls"] += 1
        tool = self._tools.get(call.name)
        if tool is None:
            self.episode.metrics["malformed_tool_calls"] += 1
            return f"There is no tool {call.name!r}. The tools are: {', '.join(self._tools) or 'none'}."
        started = time.monotonic()
        try:
            with span(
                f"execute_tool {call.name}", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name}
            ):
                text = await tool(call.arguments, self.limits.tool_call_s)
        except ToolArgumentsInvalid as error:
            self.episode.metrics["invalid_tool_arguments"] += 1
            return str(error)
        finally:
            self.episode.spent(f"tool.{call.name}", started)
            TOOL_SECONDS.observe(time.monotonic() - started, call.name)
        if tool.ends_episode:
            self.episode.final_message = text
        return text
