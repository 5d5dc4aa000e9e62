"""The engine protocol: token ids in; token ids, log-probs and weight versions out.

An `Engine` lives in the engine host's process (`host.py`), behind a ROUTER; a stage process reaches it through an
`EngineClient` (`client.py`). The agent loop knows neither: it calls `Generator`. What a foreign engine answers is
checked by `checked`, in one place for all of them, before anybody trusts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Protocol, get_args

import numpy as np

from ..errors import EngineFailed
from ..wire.messages.engines import FinishReason, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ..wire.messages.backends import ChatSettings
    from ..wire.messages.engines import UpdateMode
    from ..wire.messages.jobs import LogprobsMode, Sampling


SPAN_LIMIT = 1024
"""Most spans of one generation: weights do not change with every token."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What an engine generated for one prompt."""

    token_ids: NDArray[np.int32]
    """int32 [G]; a stop token that ended the turn is included."""
    logprobs: NDArray[np.float32]
    """float32 [G], of the distribution that the engine's `logprobs_mode` names."""
    spans: tuple[VersionSpan, ...]
    """Which weights made which tokens; together they cover 0 to G."""
    finish_reason: FinishReason
    """`length`: the turn's limit or the engine's context was reached. `abort`: new weights came, and the turn has not
    ended."""
    cached_tokens: int = 0
    """Of the prompt, found in the engine's prefix cache."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine says of itself when it registers."""

    model: str
    """What it serves, for people."""
    chat: ChatSettings
    context_tokens: int
    """Most tokens of a prompt and its answer together; 0: not known."""
    vocabulary: int
    """Ids are below this; 0: not known."""
    max_in_flight: int
    """Generations at once beyond which more would only wait."""
    logprobs_mode: LogprobsMode


class Engine(Protocol):
    """An inference engine, as its host drives it. All methods run on the host's event loop."""

    @property
    def description(self) -> EngineDescription:
        """What the engine serves, and how."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token will come from."""

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        """Continue the prompt `token_ids`, int32 [P]. Cancelling the call aborts the generation.

        Args:
            token_ids: the prompt.
            sampling: how tokens are drawn; where the engine can, it ends at `sampling.stop` too, no earlier than with
                the token that completes the text (the agent loop cuts what an engine has generated beyond).
            stop_token_ids: all that end the turn; those of `sampling` are among them.
            job_id: whose turn it is, for the engine's log.

        Raises:
            EngineFailed: the prompt is empty, holds an unknown id, or leaves no room in the context; or the engine
                answered with an error, something malformed, or not at all.
        """

    async def begin_update(self, mode: UpdateMode) -> None:
        """Generate nothing from here on, until the update is ended; somebody is about to change the weights.

        Returns when nothing is generated any more; what is asked for from now on, waits. Where that is so already it
        does nothing. An engine that failed to stop, or was cancelled in it, goes on as before.

        Args:
            mode: what becomes of what runs: it pauses between two tokens until the update is ended, and each token
                is noted with the version that made it (`keep`); it ends by itself, before this returns (`drain`); or
                it is ended as it is, with `finish_reason` `abort` (`abort`).

        Raises:
            EngineFailed: the engine could not stop.
        """

    async def end_update(self, weight_version: int | None) -> None:
        """Go on, with nothing kept that was computed with other weights. Where no update was begun, go on as well.

        Args:
            weight_version: of the weights that the engine has now; None: they are what they were.

        Raises:
            EngineFailed: the engine could not go on; the call may be made again.
        """

    async def update_weights(self, path: Path, weight_version: int, mode: UpdateMode) -> None:
        """Serve the weights at `path` from the next token on: begin, load and end in one, or what of it is to do yet.

        However it ends, the engine generates afterwards, also if an update was begun before.

        Raises:
            InvalidWeights: they cannot be used; nothing has changed.
            EngineFailed: the engine cannot take new weights, or failed on the way.
        """

    async def set_weight_version(self, weight_version: int) -> None:
        """Call the weights this from the next token on: somebody changed them by other means.

        Raises:
            EngineFailed: the engine is gone.
        """

    async def check_health(self) -> None:
        """Ask the engine whether it can serve; called with every heartbeat, so it must be cheap.

        Raises:
            EngineFailed: it cannot now; with `fatal=True`, it never will again, and the host should end.
        """

    async def close(self) -> None:
        """Abort what runs and free what the engine holds. May be called again."""


class Generator(Protocol):
    """What the agent loop calls for the policy's next turn: an engine client bound to one job and its backend."""

    async def __call__(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
    ) -> Generation:
        """Continue the prompt `token_ids`, int32 [P]; see `Engine.generate`."""


def check_prompt(token_ids: NDArray[np.int32], description: EngineDescription) -> None:
    """Raise `EngineFailed` (`refused`) if the prompt is empty, too long, or holds an unknown id."""
    context, vocabulary = description.context_tokens, description.vocabulary
    problem = ""
    if not len(token_ids):
        problem = "the prompt is empty; it needs at least one token"
    elif context and len(token_ids) >= context:
        problem = f"a prompt of {len(token_ids)} tokens leaves no room in a context of {context}"
    elif token_ids.min() < 0 or (vocabulary and token_ids.max() >= vocabulary):
        problem = (
            f"the prompt holds a token id outside of 0 to {vocabulary - 1}; is the tokenizer the model's?"
            if vocabulary
            else "the prompt holds a negative token id"
        )
    if problem:
        raise EngineFailed(problem, refused=True)


def as_plain(generation: Generation, prompt_tokens: int) -> Generation:
    """Return what an engine gave with arrays of the right types and numbers of Python's own.

    An engine may be anybody's, and count in NumPy's integers, which no message takes.

    Raises:
        EngineFailed: a value is of a wrong type.
    """
    token_ids, logprobs = np.asarray(generation.token_ids), np.asarray(generation.logprobs)
    reason, cached = generation.finish_reason, generation.cached_tokens
    if token_ids.ndim != 1 or (token_ids.size and token_ids.dtype.kind not in "iu"):
        raise EngineFailed(
            f"the engine gave token ids of type {token_ids.dtype} {list(token_ids.shape)}, not int32 [G]"
        )
    if logprobs.ndim != 1 or (logprobs.size and logprobs.dtype.kind != "f"):
        raise EngineFailed(
            f"the engine gave log-probs of type {logprobs.dtype} {list(logprobs.shape)}, not float32 [G]"
        )
    if reason not in get_args(FinishReason):
        raise EngineFailed(
            f"the engine gave the finish reason {reason!r}; there are {', '.join(get_args(FinishReason))}"
        )
    try:
        spans = tuple(VersionSpan(*map(index, (one.weight_version, one.start, one.end))) for one in generation.spans)
        cached_tokens = index(cached)
    except (TypeError, AttributeError) as error:
        raise EngineFailed(f"the engine gave version spans or cached_tokens that are no integers: {error}") from error
    return Generation(
        token_ids.astype(np.int32),
        logprobs.astype(np.float32),
        spans,
        reason,
        min(max(cached_tokens, 0), prompt_tokens),
    )


def checked(generation: Generation, max_tokens: int, vocabulary: int = 0) -> Generation:
    """Return a generation back if it can be one.

    Args:
        generation: what an engine that is not ours answered.
        max_tokens: what it was asked for at most.
        vocabulary: ids must be below this; 0: not known.

    Raises:
        EngineFailed: ids and log-probs differ in number, are too many or none, an id is outside the vocabulary, a
            log-prob is not a number or above 0, or the version spans do not cover the tokens.
    """
    count = len(generation.token_ids)
    if count != len(generation.logprobs):
        raise EngineFailed(f"the engine gave {count} token ids with {len(generation.logprobs)} log-probs")
    if count > max_tokens:
        raise EngineFailed(f"the engine generated {count} tokens where at most {max_tokens} were asked for")
    if not count and generation.finish_reason != "abort":
        raise EngineFailed("the engine ended a turn without a token")
    if count and generation.token_ids.min() < 0:
        raise EngineFailed("the engine gave a negative token id")
    if count and vocabulary and generation.token_ids.max() >= vocabulary:
        raise EngineFailed(
            f"the engine gave the token id {generation.token_ids.max()}, beyond its vocabulary of {vocabulary}; is the "
            "tokenizer its model's?"
        )
    # NaN fails every comparison. Rounding may leave a certain token a little above 0.
    if not bool(np.all(generation.logprobs <= 1e-3)) or bool(np.any(np.isinf(generation.logprobs))):
        raise EngineFailed("the engine gave a log-prob that is no logarithm of a probability")
    end = 0
    for span in generation.spans:
        if span.start != end or span.end <= span.start:
            break
        end = span.end
    if end != count or len(generation.spans) > SPAN_LIMIT:
        raise EngineFailed("the engine's weight versions do not cover the tokens that it generated, or are too many")
    return generation
