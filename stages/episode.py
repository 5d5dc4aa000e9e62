"""`Episode`, the record of a job's conversations, and `JobPolicy`, the model that takes their turns."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from msgspec.structs import replace

from ..data.conversations import finite_reward
from ..data.trajectory_builder import TrajectoryBuilder
from ..errors import HandlerFailed
from ..wire.messages.base import TIMINGS_LIMIT
from ..wire.messages.jobs import MAIN, STEPS_LIMIT, ConversationPart, Step, StepTokens

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, MutableMapping

    from ..inference.chat import ChatFormat, ChatMessage, ReadTurn
    from ..inference.engine import Generator
    from ..inference.tool_calls.call import MalformedCall, ToolCall
    from ..tools.tool import AnyTool
    from ..wire.messages.jobs import Job, LogprobsMode

MOST_TIMINGS = TIMINGS_LIMIT - 8
"""From so many timings on, further tools share one."""
OTHER_TOOLS = "tool.other"
STEP_S = 0.001
"""Seconds; shorter steps are not reported one by one."""
UNLIMITED = 2**31 - 1
"""Stands for the tokens of a context of unknown size."""


class StopReason(StrEnum):
    """Why an episode stopped."""

    DONE = "done"
    """The policy ended a turn without calling a tool."""
    ENVIRONMENT = "environment"
    """The environment that the policy acts in ended the conversation."""
    FINISHED = "finished"
    """The policy called a tool that ends the episode (see `Tool.ends_episode`)."""
    MAX_TURNS = "max_turns"
    """The job's limit on turns (`EpisodeLimits.max_turns`)."""
    MAX_TOKENS = "max_tokens"
    """The conversation reached the job's limit (`EpisodeLimits.max_tokens`); what did not fit was not added."""
    CONTEXT_LENGTH = "context_length"
    """The conversation reached the engine's own limit; what did not fit was not added."""
    TURN_LENGTH = "turn_length"
    """The policy did not end a turn within `Sampling.max_tokens`."""
    HARNESS_FAILED = "harness_failed"
    """The harness that led the rollout exited with an error, or was killed (see `stages.harness`)."""


class Turn:
    """One turn of a conversation's model."""

    __slots__ = ("_is_over", "_reward", "_row", "calls", "reasoning", "stop", "text")

    def __init__(self, read: ReadTurn | None = None, row: int | None = None) -> None:
        self.text: str = read.content if read is not None else ""
        """What it said, without its reasoning and its tool calls."""
        self.reasoning: str | None = read.reasoning if read is not None else None
        self.calls: tuple[ToolCall | MalformedCall, ...] = read.calls if read is not None else ()
        """Its tool calls, in order; a conversation without tools has none."""
        self.stop: StopReason | None = None
        """Why the conversation ends with this turn, such as a limit; None: the conversation can continue."""
        self._row = row
        self._reward: float | None = None
        self._is_over = False

    @property
    def row(self) -> int | None:
        """Its index in the conversation's turns; None: nothing was generated, or the conversation is not trained."""
        return self._row

    @property
    def reward(self) -> float | None:
        """The reward of this turn, any finite number; may be set until RUN ends. None: none.

        Raises:
            HandlerFailed: it is set to something else, RUN has ended, or the turn has no tokens that a reward could
                train.
        """
        return self._reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        if self._is_over:
            raise HandlerFailed(
                f"the reward {reward!r:.100} was given to a turn after RUN had ended; EVAL gives rewards"
            )
        if reward is None:
            self._reward = None
            return
        number = finite_reward(reward)
        if number is None:
            raise HandlerFailed(f"a turn's reward must be a finite number, and not {reward!r:.100}")
        if self._row is None:
            why = f"nothing was generated ({self.stop})" if self.stop is not None else "its conversation is not trained"
            raise HandlerFailed(f"the reward {number:g} was given to a turn without trained tokens: {why}")
        self._reward = number

    def end(self) -> None:
        """Refuse further rewards: those that there are have been passed on."""
        self._is_over = True

    def __repr__(self) -> str:
        return f"Turn({self.text!r:.60}, calls={len(self.calls)}, stop={self.stop}, reward={self._reward})"


class Named(NamedTuple):
    """The fields of a result that only some rollouts have."""

    conversations: tuple[ConversationPart, ...] = ()
    turn_rewards: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class ConversationRecord:
    """What one conversation has left behind so far."""

    name: str
    trained: bool
    trajectory: TrajectoryBuilder
    """Its tokens; those of a conversation that is not trained are not part of the result."""
    model: str = ""
    """The model that takes its turns; empty: the job's own."""
    logprobs_mode: LogprobsMode | Literal[""] = ""
    """The distribution of another model's log-probs."""
    turns: list[Turn] = field(default_factory=list)
    """The model's turns."""
    stop: StopReason | None = None
    """Why nothing more can be said; None: the conversation can continue."""
    failed: bool = False
    """A turn is under way, or has failed."""
    task: asyncio.Task[Any] | None = None
    """The task in which a turn is under way."""
    transcript: list[ChatMessage] = field(default_factory=list)
    """The messages and turns of a conversation that is not trained."""

    def part(self, first: int, segments: int) -> ConversationPart:
        """Return its part of the result, `segments` from the index `first` on."""
        part = ConversationPart(self.name, first, segments, self.trained, None, self.stop_reason or "", self.model)
        if not (self.model and segments):
            return part
        versions = self.trajectory.arrays().weight_versions
        generated = versions[versions >= 0]
        oldest = int(generated.min()) if len(generated) else -1
        return replace(part, logprobs_mode=self.logprobs_mode, oldest_version=oldest)

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """The rewards of its turns: index in the turns of its trajectory, reward."""
        return [(turn.row, turn.reward) for turn in self.turns if turn.row is not None and turn.reward is not None]

    @property
    def note(self) -> str:
        """The text of a conversation that is not trained; empty: it is trained."""
        return "\n\n".join(f"{one.role.name.lower()}: {one.content}" for one in self.transcript)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it stopped; None: it has no turn, or one is under way, or failed."""
        return None if self.failed or not self.turns else self.stop or StopReason.DONE


@dataclass(slots=True)
class Episode:
    """An episode so far, or up to its interruption.

    `metrics`: `turns`, `generated_tokens`; `prompt_tokens`, summed over the turns, and `cached_tokens`, those found in
    the engine's prefix cache; `tool_calls`, all readable calls; `malformed_tool_calls`, unreadable or naming no tool;
    `invalid_tool_arguments`, calls with arguments that the tool does not take; `continued_turns`, how often new weights
    interrupted a generation, which then continued with them. `timings`, in seconds: `engine`, `chat` (the chat
    template), and each tool (`tool.bash`).
    """

    metrics: Counter[str] = field(default_factory=Counter)
    timings: dict[str, float] = field(default_factory=dict)
    """In seconds."""
    steps: list[Step] = field(default_factory=list)
    """The summands of the timings, without short ones (`STEP_S`)."""
    began: float = field(default_factory=time.monotonic)
    trajectory: TrajectoryBuilder = field(default_factory=TrajectoryBuilder)
    """The first trained conversation."""
    conversations: list[ConversationRecord] = field(default_factory=list)
    """In the order in which they began; those that a harness leads come at its end."""
    turns_begun: int = 0
    """The trained conversations' turns, against the limit on them."""
    stop_reason: StopReason | None = None
    """The first limit that a trained conversation reached; else why the last one that spoke stopped."""
    last_text: str = ""
    """The text of the policy's last turn, without its reasoning."""
    final_message: str | None = None
    """The policy's message in the call that ended the episode, if there was such a call."""
    notes: dict[str, str] = field(default_factory=dict)
    """Notes for people, stored in the trajectory's `result.notes`."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Rewards that a program gave to turns: index in the trajectory's turns, reward."""
    so_far: Callable[[], TrajectoryBuilder] | None = None
    """Returns the conversation that a harness leads, so far; None: it is in `trajectory`."""
    is_over: bool = False
    """RUN has ended, and the record has been passed on."""

    def end(self) -> None:
        """Refuse further turns, and further rewards."""
        self.is_over = True
        for turn in (turn for one in self.conversations for turn in one.turns):
            turn.end()

    def whole(self) -> TrajectoryBuilder:
        """Return the trained conversations as one trajectory, in the order in which they began, as segments."""
        builders = [one.trajectory for one in self.conversations if one.trained and one.trajectory.tokens]
        if len(builders) < 2:
            return builders[0] if builders else self.trajectory
        whole = TrajectoryBuilder()
        for builder in builders:
            whole.append(builder)
        return whole

    def named(self) -> Named:
        """Return the conversations and the turns' rewards for the result, on the turns of `whole`.

        Both are empty for one conversation, `main`, whose turns have no rewards.
        """
        parts: list[ConversationPart] = []
        rewards = [*self.turn_rewards]
        segments = turns = 0
        for one in self.conversations:
            builder, first = one.trajectory, segments
            is_kept = one.trained and builder.tokens > 0
            segments += len(builder.segments) + 1 if is_kept else 0
            parts.append(one.part(first, segments - first))
            if is_kept:
                rewards += [(turns + row, reward) for row, reward in one.rewards]
                turns += builder.turns
        is_usual = len(parts) == 1 and parts[0].name == MAIN and parts[0].trained and not parts[0].model
        return Named(() if is_usual else tuple(parts), tuple(rewards))

    @property
    def trained_models(self) -> set[str]:
        """The models of its trained conversations; empty: the job's own."""
        return {one.model for one in self.conversations if one.trained}

    def apart(self) -> Episode:
        """Return the record of a conversation that is not trained: counts of its own, times in common."""
        return Episode(timings=self.timings, steps=self.steps, began=self.began)

    def spent(self, what: str, since: float, turn: int | None = None, tokens: StepTokens | None = None) -> None:
        """Add the time since `since` (monotonic clock) to a timing and to the steps, of a turn or the latest one."""
        seconds = time.monotonic() - since
        if what not in self.timings and len(self.timings) >= MOST_TIMINGS:
            what = OTHER_TOOLS
        self.timings[what] = self.timings.get(what, 0.0) + seconds
        if seconds >= STEP_S and len(self.steps) < STEPS_LIMIT:
            turn = self.metrics["turns"] if turn is None else turn
            self.steps.append(Step(what, turn, max(0.0, since - self.began), seconds, tokens))


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """Answers the turns of one job within the job's limits, and says where they are recorded."""

    generate: Generator
    chat: ChatFormat
    context_tokens: int
    """The engine's context; 0: unknown."""
    job: Job
    """Its `sampling` and `episode` limits apply."""
    episode: Episode
    parser_url: str = ""
    """The server that parses turns led by a program; empty: the chat format parses them."""
    others: OtherPolicies | None = None
    """The job's other models, for programs that lead; None: the job has none."""
    more_tools: MutableMapping[str, AnyTool] | None = None
    """Tools of MCP servers, in addition to those of a conversation; more may come during the rollout."""
    served: str = ""
    """What the server or the backend calls the model."""
    logprobs_mode: LogprobsMode | Literal[""] = ""
    """The distribution of another model's log-probs; empty for the job's own model, and for an endpoint."""


class OtherPolicies(Protocol):
    """What `other_models.OtherModels` is for programs that lead a rollout."""

    def maps(self, role: str) -> bool:
        """Return whether the job maps a name to a model other than the policy."""

    async def policy(self, role: str, *, parsed: bool = False) -> JobPolicy:
        """Return the policy that takes a model's turns."""
