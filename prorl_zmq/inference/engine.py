"""The engine protocol: token ids in; token ids, log-probs and weight versions out.

An `Engine` lives in the engine host's process (`host.py`), behind a ROUTER; a stage process reaches it through an
`EngineClient` (`client.py`). The agent loop knows neither: it calls `Generator`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ..messages import Sampling, VersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What an engine generated for one prompt."""

    token_ids: NDArray[np.int32]
    """int32 [G]; a stop token that ended the turn is included."""
    logprobs: NDArray[np.float32]
    """float32 [G], of the distribution that was sampled from."""
    spans: tuple[VersionSpan, ...]
    """Which weights made which tokens; together they cover 0 to G."""
    finish_reason: Literal["stop", "length"]
    """`length`: the turn's limit or the engine's context was reached."""


class Engine(Protocol):
    """An inference engine, as its host drives it. All methods run on the host's event loop."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token will come from."""

    @property
    def chat_format(self) -> str:
        """The name under which `chat.load_chat_format` finds the engine's conversations-to-tokens rules."""

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        """Continue the prompt `token_ids`, int32 [P]. Cancelling the call aborts the generation.

        Raises:
            EngineFailed: the prompt is empty, holds an unknown id, or leaves no room in the context.
        """

    async def update_weights(self, path: Path, weight_version: int) -> None:
        """Serve the weights at `path` from the next token on, in running generations too.

        Raises:
            InvalidWeights: they cannot be used; nothing has changed.
        """

    async def close(self) -> None:
        """Abort what runs and free what the engine holds."""


class Generator(Protocol):
    """What the agent loop calls for the policy's next turn: an engine client bound to one job and its backend."""

    async def __call__(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
    ) -> Generation:
        """Continue the prompt `token_ids`, int32 [P]; see `Engine.generate`."""
