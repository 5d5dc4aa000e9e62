"""The example's task `letters`: answer in letters of the first half of the alphabet. A tiny model learns it on a CPU.

`[service] task_modules` in topology.toml names this file. Change it, or put your own task in its place.
"""

from __future__ import annotations

import msgspec

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase

MARKS = ("<tool_call>", "</think>")
"""What the tiny model writes and is not a letter; a policy would settle for the letters in them."""


class Letters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instance."""

    name: str
    """Part of the prompt, so that prompts differ."""


class LettersHandler(AgentHandler[Letters]):
    """One turn without tools; the reward is the share of the answer's characters that are a to m."""

    task = "letters"
    instance_type = Letters

    async def init(self, phase: InitPhase[Letters]) -> PhaseData:
        """Prepare nothing."""
        del phase
        return {}

    async def run(self, phase: RunPhase[Letters]) -> PhaseData:
        """Have the policy answer."""
        episode = await phase.converse([ChatMessage(Role.USER, f"Write letters, {phase.instance.name}.")], [])
        return {"text": episode.last_text}

    async def eval(self, phase: EvalPhase[Letters]) -> Evaluation:
        """Count."""
        return Evaluation(score(phase.data["text"]))


def score(text: str) -> float:
    """Return the share of a text's characters that are letters of the first half of the alphabet."""
    for mark in MARKS:
        text = text.replace(mark, "")
    return sum("a" <= letter <= "m" for letter in text) / max(len(text), 1)
