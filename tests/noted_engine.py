"""Scripted engines that keep what they were asked and what they said, also with a model's own chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from chat_families import FAMILIES, save_tokenizer

from prorl_zmq.testing.scripted_engine import ScriptedEngine
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from prorl_zmq import Sampling, Trajectory
    from prorl_zmq.inference.engine import Generation


class Said(NamedTuple):
    """One generation."""

    job_id: str
    prompt: NDArray[np.int32]
    generation: Generation


class NotedEngine(ScriptedEngine):
    """Says what a function of the prompt's text returns."""

    def __init__(self, script: Callable[[str], str]) -> None:
        super().__init__(script)
        self.said: list[Said] = []

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        made = await super().generate(token_ids, sampling, stop_token_ids, job_id)
        self.said.append(Said(job_id, token_ids.copy(), made))
        return made


class FamilyEngine(NotedEngine):
    """Speaks by the chat template of a family of models, whose tokenizer it writes to a folder."""

    def __init__(self, family: str, script: Callable[[str], str], folder: Path) -> None:
        from transformers import AutoTokenizer  # here, as in `chat_families`

        super().__init__(script)
        settings = ChatSettings("transformers", str(save_tokenizer(FAMILIES[family], folder)), history="append")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._end = self._tokenizer.convert_tokens_to_ids(FAMILIES[family].end)
        self._description = replace(self._description, chat=settings, vocabulary=len(self._tokenizer))

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        return str(self._tokenizer.decode(token_ids.tolist()))

    def _next_answer(self, job_id: str, prompt: list[int]) -> list[int]:
        assert callable(self._script)
        said = self._script(self._tokenizer.decode(prompt))
        return [*self._tokenizer(said, add_special_tokens=False)["input_ids"], self._end]


def check_exact(trajectory: Trajectory, said: Sequence[Said]) -> int:
    """Check that one segment is what the engine saw and generated, to the token; return its generations' number."""
    generations = 0
    for start, end, _ in trajectory.turns.tolist():
        generated = start + np.flatnonzero(trajectory.loss_mask[start:end])
        if not len(generated):
            continue
        first, last = int(generated[0]), int(generated[-1]) + 1
        prompt = trajectory.token_ids[:first]
        (one,) = [each for each in said if each.job_id == trajectory.job_id and np.array_equal(each.prompt, prompt)]
        np.testing.assert_array_equal(trajectory.token_ids[first:last], one.generation.token_ids)
        np.testing.assert_array_equal(trajectory.logprobs[first:last], one.generation.logprobs)
        generations += 1
    return generations
