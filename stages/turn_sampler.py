"""One turn of the policy: requested from the engine, continued after new weights, cut at a stop text."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..data.records import part_of
from ..errors import EngineFailed
from ..inference.engine import Generation
from ..inference.records import joined_records
from ..wire.messages.engines import VersionSpan
from ..wire.messages.jobs import StepTokens
from ..wire.records import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..wire.messages.jobs import Sampling
    from .episode import JobPolicy

EMPTY_ABORTS = 8
"""How often new weights may come before a turn's first token; beyond that, the engine counts as failed."""


@dataclass(frozen=True, slots=True)
class TurnSampler:
    """Samples turns of a policy; counts and times them in its episode."""

    policy: JobPolicy
    sampling: Sampling
    turn_ends: bool = True
    """Whether the ids that end a turn of the chat format end it, besides those of the sampling."""

    async def sample(
        self,
        prompt: NDArray[np.int32],
        wanted: int,
        turn: int,
        rows_known: int = 0,
        take: Callable[[Generation, int], None] = lambda _turn_so_far, _start: None,
    ) -> Generation:
        """Return a turn of at most `wanted` tokens; after an interruption by new weights it continues with them.

        Args:
            prompt: int32 [P].
            wanted: at least 1.
            turn: the turn's number in the job, part of its seed.
            rows_known: the prompt's first tokens whose experts are recorded.
            take: called with the turn so far, and the index of its first new token.

        Raises:
            EngineFailed: the engine failed, or ends generations before their first token.
        """
        wanted = min(wanted, self.sampling.max_tokens)
        seed = turn_seed(self.sampling.seed, turn)
        metrics = self.policy.episode.metrics
        metrics["turns"] += 1
        number = metrics["turns"]
        turn_so_far = await self._generated(prompt, wanted, seed, number, rows_known)
        metrics["generated_tokens"] += len(turn_so_far.token_ids)
        take(turn_so_far, 0)
        empty = 0
        while turn_so_far.finish_reason == "abort":
            done = len(turn_so_far.token_ids)
            empty = 0 if done else empty + 1
            if empty > EMPTY_ABORTS:
                raise EngineFailed(f"the engine ended {empty} generations before their first token", unreachable=True)
            metrics["continued_turns"] += 1
            so_far = np.concatenate([prompt, turn_so_far.token_ids])
            seed_of_part = turn_seed(seed, metrics["continued_turns"])
            rows = rows_known + rows_of_experts(turn_so_far)
            part = await self._generated(so_far, wanted - done, seed_of_part, number, rows)
            turn_so_far = self._ended(joined(turn_so_far, part), wanted, len(prompt) - rows_known)
            metrics["generated_tokens"] += len(turn_so_far.token_ids) - done
            take(turn_so_far, done)
        return turn_so_far

    async def _generated(
        self, prompt: NDArray[np.int32], max_tokens: int, seed: int | None, number: int, rows_known: int
    ) -> Generation:
        sampling = msgspec.structs.replace(self.sampling, max_tokens=max_tokens, seed=seed)
        rows = (rows_known,) if rows_known else ()
        episode, started, tokens = self.policy.episode, time.monotonic(), None
        try:
            done = await self.policy.generate(prompt, sampling, self._stop_token_ids(), *rows)
            if done.room_wait_s:
                started += done.room_wait_s
                episode.timings["room"] = episode.timings.get("room", 0.0) + done.room_wait_s
            tokens = StepTokens(len(prompt), done.cached_tokens, done.again_tokens, len(done.token_ids))
        finally:
            episode.spent("engine", started, number, tokens)
        episode.metrics["prompt_tokens"] += len(prompt)
        episode.metrics["cached_tokens"] += done.cached_tokens
        return self._ended(done, max_tokens, len(prompt) - rows_known)

    def _stop_token_ids(self) -> Sequence[int]:
        of_chat = self.policy.chat.stop_token_ids if self.turn_ends else ()
        return tuple(dict.fromkeys((*of_chat, *self.sampling.stop_token_ids)))

    def _ended(self, generation: Generation, wanted: int, prompt_rows: int) -> Generation:
        """Cut a turn at a stop text; a turn of all `wanted` tokens is complete, even if new weights ended it."""
        cut = cut_at(generation, self.sampling.stop, self.policy.chat.decode, prompt_rows)
        if cut.finish_reason == "abort" and len(cut.token_ids) >= wanted:
            return replace(cut, finish_reason="length")
        return cut


def turn_seed(seed: int | None, turn: int) -> int | None:
    """Return the seed of a turn: turns with equal prompts differ, and a job can be repeated exactly."""
    return (seed * 1_000_003 + turn) % 2**63 if seed is not None else None


def rows_of_experts(generation: Generation) -> int:
    """Return how many rows of experts an engine gave."""
    return len(generation.records.get(EXPERTS, ()))


def joined(first: Generation, second: Generation) -> Generation:
    """Return one generation made of two, the second of which continued the first."""
    start = len(first.token_ids)
    moved = (VersionSpan(span.weight_version, start + span.start, start + span.end) for span in second.spans)
    return Generation(
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.logprobs, second.logprobs]),
        (*first.spans, *moved),
        second.finish_reason,
        first.cached_tokens + second.cached_tokens,
        joined_records((first, second)),
    )


def version_per_token(generation: Generation) -> NDArray[np.int32]:
    """Expand a generation's version spans, int32 [G]."""
    spans = generation.spans
    versions = np.repeat(
        np.array([span.weight_version for span in spans], np.int32), [span.end - span.start for span in spans]
    )
    if len(versions) != len(generation.token_ids):
        raise EngineFailed("the engine's weight versions do not cover the tokens that it generated")
    return versions


def cut_at(
    generation: Generation, texts: Sequence[str], decode: Callable[[NDArray[np.int32]], str], prompt_rows: int = 0
) -> Generation:
    """Return the generation up to the token that completes the first stop text; unchanged if there is none.

    Engines notice a text of `Sampling.stop` late or never; this cut is the same for every engine. `prompt_rows` is how
    many rows of experts are of the prompt.
    """

    def ended(count: int) -> bool:
        said = decode(generation.token_ids[:count])
        return any(text in said for text in texts)

    if not texts or not ended(len(generation.token_ids)):
        return generation
    enough = bisect_left(range(len(generation.token_ids)), True, lo=1, key=ended)
    kept = [span for span in generation.spans if span.start < enough]
    return replace(
        generation,
        token_ids=generation.token_ids[:enough],
        logprobs=generation.logprobs[:enough],
        spans=tuple(msgspec.structs.replace(span, end=min(span.end, enough)) for span in kept),
        finish_reason="stop",
        records=part_of(generation.records, 0, enough, 0, prompt_rows + enough),
    )
