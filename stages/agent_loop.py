"""The agent loop: prompt, generate, call tools, repeat; token ids in, token ids out.

Only new messages are tokenised. Generated ids are appended unchanged, so the prompt of turn k+1 begins with exactly the
ids of turn k, and the trajectory is what the engine saw and produced. If the model's chat template changes earlier
turns, the next prompt begins a new segment of the trajectory.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.trajectory import Role, TrajectoryBuilder
from ..errors import InvalidJob
from ..inference.chat import ChatMessage
from ..inference.tool_calls.call import MalformedCall, ToolCall
from ..metrics.catalog import TOOL_SECONDS
from ..system.traces import span
from ..tools.tool import Tool, ToolArgumentsInvalid
from .turn_sampler import Record, TurnSampler, version_per_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..inference.chat import ChatFormat, PolicyTurn, Prompt
    from ..inference.engine import Generation, Generator
    from ..wire.messages.jobs import EpisodeLimits, Sampling

LONG_TEXT = 32 * 1024
"""Characters that are tokenised in a thread."""
UNLIMITED = 2**31 - 1
"""Tokens of a context whose size is not known."""


class StopReason(StrEnum):
    """Why an episode stopped."""

    DONE = "done"
    """The policy ended a turn without calling a tool."""
    FINISHED = "finished"
    """The policy called a tool that ends the episode (see `Tool.ends_episode`)."""
    MAX_TURNS = "max_turns"
    """The job's limit on turns (`EpisodeLimits.max_turns`)."""
    MAX_TOKENS = "max_tokens"
    """The conversation reached the job's limit (`EpisodeLimits.max_tokens`); what no longer fitted was not added."""
    CONTEXT_LENGTH = "context_length"
    """The conversation reached the engine's own limit; what no longer fitted was not added."""
    TURN_LENGTH = "turn_length"
    """The policy did not end a turn within `Sampling.max_tokens`."""
    HARNESS_FAILED = "harness_failed"
    """The harness that led the rollout ended with an error, or had to be killed (see `stages.harness`)."""


@dataclass(slots=True)
class Episode(Record):
    """An episode as far as it has come, or as far as it came before it was interrupted.

    Of `metrics`: `turns`, `generated_tokens`; `prompt_tokens`, summed over the turns, and `cached_tokens`, those of
    them that the engine's prefix cache had; `tool_calls`, all that could be read; `malformed_tool_calls`, which could
    not be read or name no tool; `invalid_tool_arguments`, calls of a tool with arguments that it does not take;
    `continued_turns`, how often new weights ended a generation, which then went on with them. Of `timings`: seconds in
    the `engine`, in the `chat` template, and in each tool (`tool.bash`).
    """

    trajectory: TrajectoryBuilder = field(default_factory=TrajectoryBuilder)
    stop_reason: StopReason | None = None
    last_text: str = ""
    """The text of the policy's last turn, without its reasoning."""
    final_message: str | None = None
    """What the policy said with the call that ended the episode, if there was one."""
    notes: dict[str, str] = field(default_factory=dict)
    """For people, in the trajectory's `result.notes`."""
    so_far: Callable[[], TrajectoryBuilder] | None = None
    """Returns the conversation that a harness leads, until now; None: it is in `trajectory`."""


class _Budget(NamedTuple):
    """How many more tokens fit, and the limit that they end at."""

    tokens: int
    limit: StopReason


def check_opening(messages: Any, tools: Any) -> None:
    """Check what a handler gives to `phase.converse`.

    Raises:
        TypeError: something is not of the declared type.
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
        if isinstance(tool, type) or not isinstance(tool, Tool):
            raise TypeError(f"a tool must be an object of a class derived from Tool, and not {tool!r:.100}")


@dataclass
class AgentLoop:
    generate: Generator
    chat: ChatFormat
    context_tokens: int
    """0: not known."""
    tools: Sequence[Tool[Any]]
    sampling: Sampling
    limits: EpisodeLimits
    episode: Episode

    def __post_init__(self) -> None:
        self.context_tokens = self.context_tokens or UNLIMITED
        self._tools = {tool.name: tool for tool in self.tools}
        self._trajectory = self.episode.trajectory
        self._sampler = TurnSampler(self.generate, self.chat, self.sampling, self.episode)

    async def run(self, messages: Sequence[ChatMessage]) -> StopReason:
        self.episode.stop_reason = await self._turns(messages)
        return self.episode.stop_reason

    async def _turns(self, messages: Sequence[ChatMessage]) -> StopReason:
        conversation = self.chat.conversation(messages, [tool.schema() for tool in self._tools.values()])
        new = sum(len(message.content) for message in messages)
        for turn in range(self.limits.max_turns):
            with span("turn", {"prorl.turn": turn}):
                started = time.monotonic()
                # Megabytes take seconds, in which this process would be silent.
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
        """Append a prompt, if that leaves room for a token of the policy; return that budget."""
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
        """Return what still fits behind so many tokens of a segment."""
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
        """Answer a turn's tool calls; None: one of them ended the episode, and the policy will read nothing more."""
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
