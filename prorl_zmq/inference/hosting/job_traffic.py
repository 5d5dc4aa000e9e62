"""`JobTraffic`: the contexts of an engine's jobs, and the prompt tokens computed again, from the turns alone. Pure.

A job may have several conversations, such as those of sub-agents. A turn continues the longest conversation of its job
whose tokens are the beginning of its prompt. The engine has computed these before, with the present weights, so those
that it did not find in its cache count as computed again. Caches keep whole blocks: up to `BLOCK_TOKENS` may lack
though nothing was lost.

No message says that a job has ended, but the broker reports how many jobs hold the engine. So the jobs whose last turn
is longest ago are forgotten.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_TOKENS = 256
CONVERSATION_LIMIT = 16
"""Most conversations remembered per job; the one without a turn for longest is forgotten."""
ACTIVE_S = 120.0
"""A conversation counts in its job's context for this time after a turn; the one with the last turn always does."""


@dataclass(slots=True)
class _Conversation:
    tokens: int
    digest: int
    """CRC-32 of the tokens."""
    at: float
    is_computed: bool = True
    """Whether the present weights have computed it."""


@dataclass(slots=True)
class _Job:
    conversations: list[_Conversation] = field(default_factory=list)
    """The one with the last turn is last."""


class JobTraffic:
    def __init__(self) -> None:
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        """The one with the last turn is last."""
        self.prompt_tokens = 0
        """Tokens of all prompts."""
        self.again_tokens = 0
        """Of these, tokens computed again."""

    def note_turn(
        self, job_id: str, prompt: NDArray[np.int32], generated: NDArray[np.int32], cached_tokens: int, now: float
    ) -> int:
        """Record a turn that has ended, and return the tokens of its prompt that were computed again.

        Args:
            job_id: the job.
            prompt: int32 [P], contiguous.
            generated: int32 [G], contiguous.
            cached_tokens: tokens of the prompt that the engine found in its cache.
            now: the time in seconds, which never decreases.
        """
        job = self._jobs.setdefault(job_id, _Job())
        self._jobs.move_to_end(job_id)
        known, again = _continued(job, prompt), 0
        self.prompt_tokens += len(prompt)
        if known is not None:
            job.conversations.remove(known)
            lost = known.tokens - cached_tokens
            again = lost if lost > BLOCK_TOKENS and known.is_computed else 0
            self.again_tokens += again
        digest = zlib.crc32(generated.data, zlib.crc32(prompt.data))
        job.conversations.append(_Conversation(len(prompt) + len(generated), digest, now))
        del job.conversations[:-CONVERSATION_LIMIT]
        return again

    def keep_latest(self, jobs: int) -> None:
        """Forget all but this number of jobs."""
        while len(self._jobs) > jobs:
            self._jobs.popitem(last=False)

    def contexts(self, now: float) -> list[int]:
        """Return the tokens of each job's active conversations together."""
        return [
            sum(one.tokens for one in job.conversations[:-1] if one.at + ACTIVE_S > now) + job.conversations[-1].tokens
            for job in self._jobs.values()
        ]

    def note_weights(self) -> None:
        """Record that new weights have emptied the engine's cache: to compute a prompt is no loss then."""
        for job in self._jobs.values():
            for one in job.conversations:
                one.is_computed = False


def _continued(job: _Job, prompt: NDArray[np.int32]) -> _Conversation | None:
    """Return the longest conversation that a prompt continues."""
    begun = [one for one in job.conversations if one.tokens <= len(prompt)]
    for one in sorted(begun, key=lambda one: -one.tokens):
        if zlib.crc32(prompt[: one.tokens].data) == one.digest:
            return one
    return None
