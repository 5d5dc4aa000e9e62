"""`Episode`, the record of a job's conversations, and `JobPolicy`, which answers them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ..data.trajectory import TrajectoryBuilder
from ..wire.messages.jobs import STEPS_LIMIT, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..inference.chat import ChatFormat
    from ..inference.engine import Generator
    from ..wire.messages.jobs import Job
    from .other_models import OtherModels

STEP_S = 0.001
"""Seconds; shorter steps are not reported one by one."""
UNLIMITED = 2**31 - 1
"""Stands for the tokens of a context of unknown size."""


class StopReason(StrEnum):
    """Why an episode stopped."""

    DONE = "done"
    """The policy ended a turn without calling a tool."""
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
    stop_reason: StopReason | None = None
    last_text: str = ""
    """The text of the policy's last turn, without its reasoning."""
    final_message: str | None = None
    """The policy's message in the call that ended the episode, if there was such a call."""
    notes: dict[str, str] = field(default_factory=dict)
    """Notes for people, stored in the trajectory's `result.notes`."""
    so_far: Callable[[], TrajectoryBuilder] | None = None
    """Returns the conversation that a harness leads, so far; None: it is in `trajectory`."""

    def spent(self, what: str, since: float) -> None:
        """Add the time since `since` (monotonic clock) to a timing and to the steps."""
        seconds = time.monotonic() - since
        self.timings[what] = self.timings.get(what, 0.0) + seconds
        if seconds >= STEP_S and len(self.steps) < STEPS_LIMIT:
            self.steps.append(Step(what, self.metrics["turns"], max(0.0, since - self.began), seconds))


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
    others: OtherModels | None = None
    """The job's other models, for programs that lead; None: the job has none."""
