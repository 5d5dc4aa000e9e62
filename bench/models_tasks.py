"""The tasks of the two trainers of bench/models_training.py: answer in letters of one half of the alphabet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_zmq.examples.trainers.shared.letters import Letters, LettersHandler
from prorl_zmq.stages.handler import Evaluation

if TYPE_CHECKING:
    from prorl_zmq.stages.handler import EvalPhase


class FirstHalfHandler(LettersHandler):
    """The reward is the share of the answer's characters that are a to m."""

    task = "first_half"


class SecondHalfHandler(LettersHandler):
    """The reward is the share of the answer's characters that are n to z."""

    task = "second_half"

    async def eval(self, phase: EvalPhase[Letters]) -> Evaluation:
        """Count."""
        text = phase.data["text"]
        return Evaluation(sum("n" <= letter <= "z" for letter in text) / max(len(text), 1))
