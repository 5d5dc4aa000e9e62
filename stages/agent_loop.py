"""The agent loop: prompt, generate, call tools, repeat; token ids in, token ids out.

Only messages that are new are ever tokenised. What the engine generated is appended as it came, so the prompt of turn
k+1 begins with exactly the ids of turn k, and the trajectory is what the engine saw and produced.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..errors import EngineFailed, InvalidJob
from ..inference.chat import ChatMessage
from ..tools.tool import ToolArgumentsInvalid
from ..trajectory import Role, TrajectoryBuilder
from .tool_calls import MalformedCall, ToolCall, parse_tool_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..inference.chat import ChatFormat
    from ..inference.engine import Generation, Generator
    from ..messages import EpisodeLimits, Sampling
    from ..tools.tool import Tool


class StopReason(StrEnum):
    """Why an episode stopped."""

    DONE = "done"
    """The policy ended a turn without calling a tool."""
    FINISHED = "finished"
    """The policy called a tool that ends the episode (see `Tool.ends_episode`)."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The conversation reached its limit; what no longer fitted was not added."""
    TURN_LENGTH = "turn_length"
    """The policy did not end a turn within `Sampling.max_tokens` or the engine's context."""


@dataclass(slots=True)
class Episode:
    """What an episode is so far; of one that was interrupted, all that there is."""

    trajectory: TrajectoryBuilder = field(default_factory=TrajectoryBuilder)
    stop_reason: StopReason | None = None
    last_text: str = ""
    """The text of the policy's last turn."""
    final_message: str | None = None
    """What the policy said with the call that ended the episode, if there was one."""
    metrics: Counter[str] = field(default_factory=Counter)
    """`turns` and `generated_tokens`; `tool_calls`, all that could be read; `malformed_tool_calls`, which could not be
    read or name no tool; `invalid_tool_arguments`, calls of a tool with arguments that it does not take."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds in the `engine` and in each tool (`tool.bash`)."""

    def spent(self, what: str, since: float) -> None:
        """Add the time since `since` (monotonic clock) to a timing."""
        self.timings[what] = self.timings.get(what, 0.0) + time.monotonic() - since


class AgentLoop:
    """Runs one episode.

    Args:
        generate: the job's backend.
        chat: its chat format.
        tools: what the policy may call.
        sampling: how its tokens are drawn.
        limits: where the episode stops.
        episode: where everything is recorded.
    """

    def __init__(
        self,
        generate: Generator,
        chat: ChatFormat,
        tools: Sequence[Tool[Any]],
        sampling: Sampling,
        limits: EpisodeLimits,
        episode: Episode,
    ) -> None:
        self._generate = generate
        self._chat = chat
        self._tools = {tool.name: tool for tool in tools}
        self._sampling = sampling
        self._limits = limits
        self._episode = episode
        self._trajectory = episode.trajectory

    async def run(self, messages: Sequence[ChatMessage]) -> StopReason:
        """Run the episode from its opening messages to its end.

        Raises:
            InvalidJob: the opening messages leave no room for a turn of the policy.
            EngineFailed, ToolSessionLost: what the episode needs is broken.
        """
        for message in messages:
            if not self._add_message(message):
                raise InvalidJob(
                    f"the opening messages do not fit into episode.max_tokens ({self._limits.max_tokens})",
                    field="episode.max_tokens",
                )
        self._episode.stop_reason = await self._take_turns()
        return self._episode.stop_reason

    async def _take_turns(self) -> StopReason:
        for turn in range(self._limits.max_turns):
            opening = self._chat.generation_prompt()
            room = self._limits.max_tokens - self._trajectory.tokens - len(opening)
            if room < 1:
                return StopReason.MAX_TOKENS
            generation = await self._policy_turn(opening, min(room, self._sampling.max_tokens), turn)
            if generation.finish_reason == "length":
                return StopReason.MAX_TOKENS if len(generation.token_ids) >= room else StopReason.TURN_LENGTH
            calls = parse_tool_calls(self._episode.last_text)
            if not calls:
                return StopReason.DONE
            answers: list[ChatMessage] = []
            for call in calls:
                answers.append(ChatMessage(Role.TOOL, await self._answer(call)))
                if self._episode.final_message is not None:
                    # The policy will read nothing more, so the answers are not added.
                    return StopReason.FINISHED
            ending = self._chat.end_of_turn(generation.token_ids)
            if len(ending) + self._trajectory.tokens > self._limits.max_tokens:
                return StopReason.MAX_TOKENS
            self._trajectory.add_context(ending)
            if not all(self._add_message(answer) for answer in answers):
                return StopReason.MAX_TOKENS
        return StopReason.MAX_TURNS

    async def _policy_turn(self, opening: NDArray[np.int32], max_tokens: int, turn: int) -> Generation:
        self._trajectory.begin_turn(Role.ASSISTANT)
        self._trajectory.add_context(opening)
        seed = self._sampling.seed
        sampling = msgspec.structs.replace(
            self._sampling, max_tokens=max_tokens, seed=turn_seed(seed, turn) if seed is not None else None
        )
        started = time.monotonic()
        generation = await self._generate(self._trajectory.token_ids(), sampling, self._chat.stop_token_ids)
        self._episode.spent("engine", started)
        versions = version_per_token(generation)
        self._trajectory.add_generated(generation.token_ids, generation.logprobs, versions)
        self._episode.metrics["turns"] += 1
        self._episode.metrics["generated_tokens"] += len(generation.token_ids)
        self._episode.last_text = self._chat.decode(generation.token_ids)
        return generation

    async def _answer(self, call: ToolCall | MalformedCall) -> str:
        if isinstance(call, MalformedCall):
            self._episode.metrics["malformed_tool_calls"] += 1
            return call.feedback
        self._episode.metrics["tool_calls"] += 1
        tool = self._tools.get(call.name)
        if tool is None:
            self._episode.metrics["malformed_tool_calls"] += 1
            return f"There is no tool {call.name!r}. The tools are: {', '.join(self._tools) or 'none'}."
        started = time.monotonic()
        try:
            text = await tool(call.arguments, self._limits.tool_call_s)
        except ToolArgumentsInvalid as error:
            self._episode.metrics["invalid_tool_arguments"] += 1
            return str(error)
        finally:
            self._episode.spent(f"tool.{call.name}", started)
        if tool.ends_episode:
            self._episode.final_message = text
        return text

    def _add_message(self, message: ChatMessage) -> bool:
        """Append a message; false, and no change, if it does not fit."""
        token_ids = self._chat.encode_message(message)
        if self._trajectory.tokens + len(token_ids) > self._limits.max_tokens:
            return False
        self._trajectory.begin_turn(message.role)
        self._trajectory.add_context(token_ids)
        return True


def turn_seed(seed: int, turn: int) -> int:
    """Give a turn's own seed, so that two turns with the same prompt differ and a job can be repeated exactly."""
    return (seed * 1_000_003 + turn) % 2**63


def version_per_token(generation: Generation) -> NDArray[np.int32]:
    """Spell out a generation's version spans, int32 [G].

    Raises:
        EngineFailed: the spans do not cover the tokens.
    """
    spans = generation.spans
    versions = np.repeat(
        np.array([span.weight_version for span in spans], np.int32), [span.end - span.start for span in spans]
    )
    if len(versions) != len(generation.token_ids):
        raise EngineFailed("the engine's weight versions do not cover the tokens that it generated")
    return versions
