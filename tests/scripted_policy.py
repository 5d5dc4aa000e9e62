"""An engine that says what a script tells it, as token ids; it keeps every prompt that it saw and all that it said."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.inference.engine import Generation
from prorl_zmq.testing.scripted_engine import tokens_of
from prorl_zmq.wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from prorl_zmq.data.trajectory import TokenArrays
    from prorl_zmq.wire.messages.jobs import Sampling

CHAT = EmbeddedChatFormat()


@dataclass
class Said:
    """One generation."""

    prompt: NDArray[np.int32]
    generation: Generation


@dataclass
class ScriptedPolicy:
    """Implements `engine.Generator`.

    Args:
        script: what it says, in order, and the last for ever; or what it says to the text of a prompt. An
            `EngineFailed` is raised.
        version: of its weights; each turn that it says has the next one.
    """

    script: list[str | EngineFailed] | Callable[[str], str | EngineFailed]
    version: int = 0
    said: list[Said] = field(default_factory=list)

    async def __call__(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
    ) -> Generation:
        if callable(self.script):
            text = self.script(CHAT.decode(token_ids))
        else:
            text = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(text, EngineFailed):
            raise text
        ids = np.array(tokens_of(text), np.int32)
        finish = "length" if len(ids) > sampling.max_tokens else "stop"
        ids = ids[: sampling.max_tokens]
        logprobs = -np.random.default_rng(len(self.said)).random(len(ids), np.float32)
        self.version += 1
        generation = Generation(ids, logprobs, (VersionSpan(self.version, 0, len(ids)),), finish)
        self.said.append(Said(token_ids.copy(), generation))
        return generation

    def check(self, segments: Sequence[TokenArrays]) -> None:
        """Assert that each generated token of the segments is one that was said, after the prompt that it was said to.

        And that nothing is there twice.
        """
        found = set()
        for arrays in segments:
            for start, end in generated(arrays):
                said = next(
                    index
                    for index, one in enumerate(self.said)
                    if one.generation.spans[0].weight_version == arrays.weight_versions[start]
                )
                one = self.said[said]
                assert np.array_equal(arrays.token_ids[:start], one.prompt)
                assert np.array_equal(arrays.token_ids[start:end], one.generation.token_ids)
                assert np.array_equal(arrays.logprobs[start:end], one.generation.logprobs)
                assert set(arrays.weight_versions[start:end]) == {one.generation.spans[0].weight_version}
                assert said not in found
                found.add(said)


def generated(arrays: TokenArrays) -> list[tuple[int, int]]:
    """The ranges of generated tokens; two turns are never side by side."""
    text = "".join("1" if mask else "0" for mask in arrays.loss_mask)
    return [match.span() for match in re.finditer("1+", text)]
