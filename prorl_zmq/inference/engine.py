"""The engine protocol: token ids in; token ids, log-probs and weight versions out, or the scores of a text.

An `Engine` runs in the engine host's process (`hosting.host`), behind a ROUTER; a stage process reaches it through an
`EngineClient` (`client`). The agent loop calls a `Generator`. `checked` checks the answers of all engines that other
packages and servers provide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args

import numpy as np

from ..data.scores import SCORES_TOP_LIMIT, Scores, first_scores
from ..errors import EngineFailed
from ..wire.messages.engines import FinishReason, VersionSpan
from ..wire.records import NO_LOGPROB, RECORD_TOP_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ..wire.messages.chat import ChatSettings
    from ..wire.messages.engines import TransferCall, UpdateMode
    from ..wire.messages.jobs import LogprobsMode, Sampling
    from .kv_figures import KvFigures


PAUSES: Final[dict[UpdateMode, str]] = {"keep": "keep", "drain": "wait", "abort": "abort"}
"""vLLM's names for the modes of an update."""
FINISH_REASONS: Final[dict[str | None, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}
"""As vLLM and SGLang name them."""
SPAN_LIMIT = 1024
"""Most spans of one generation: weights do not change with every token."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """An engine's output for one prompt."""

    token_ids: NDArray[np.int32]
    """int32 [G]; a stop token that ended the turn is included."""
    logprobs: NDArray[np.float32]
    """float32 [G], of the distribution that the engine's `logprobs_mode` names."""
    spans: tuple[VersionSpan, ...]
    """Which weights generated which tokens; together they cover 0 to G."""
    finish_reason: FinishReason
    """`length`: the turn's limit or the engine's context was reached. `abort`: new weights came before the turn
    ended."""
    cached_tokens: int = 0
    """Tokens of the prompt found in the engine's prefix cache."""
    records: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """The arrays that `Wanted.record` asks for, by the names, types and shapes of `wire.records`."""
    again_tokens: int = 0
    """Tokens of the prompt that had been cached and were computed again: its host counts them."""
    room_wait_s: float = 0.0
    """How long the turn waited for room: parked by the host, or as the job left an engine that failed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks of an engine besides tokens and log-probs."""

    record: tuple[str, ...] = ()
    """As in `Job.record`; see `wire.records`."""
    rows_known: int = 0
    """Rows of experts that the caller has: the engine gives those from this position on."""
    adapter: tuple[str, int] | None = None
    """Model and version of the loaded adapter that generates; None: the engine's own weights."""


NOTHING_MORE: Final = Wanted()


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where an engine publishes the events of its prefix cache, in vLLM's form."""

    endpoint: str
    """Of a PUB socket."""
    replay: str
    """Of a ROUTER that repeats batches."""
    block_tokens: int
    """Tokens of a cache block."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """An engine's description of itself for its registration."""

    model: str
    """The model's name, for people."""
    chat: ChatSettings
    context_tokens: int
    """Most tokens of a prompt and its answer together; 0: unknown."""
    vocabulary: int
    """Ids are below this; 0: unknown."""
    max_in_flight: int
    """Concurrent generations beyond which more would only wait."""
    logprobs_mode: LogprobsMode
    records: tuple[str, ...] = ()
    """Names of the records that it gives; see `wire.records`."""
    top_limit: int = RECORD_TOP_LIMIT
    """The largest K of `top_logprobs:K`."""
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    """Why it does not give other records, by their names: at most 256 characters each."""
    scores: bool = False
    """Whether it is a `ScoringEngine`."""
    adapter_slots: int = 0
    """Adapters whose generations run at the same time; 0: it is no `AdapterEngine`."""
    reads_here: bool = True
    """Whether it reads new weights on its host's machine, so that its host can read them ahead."""
    kv: bool = False
    """Whether it is a `KvEngine`."""
    kv_events: KvEventSource | None = None
    """Its host keeps an index of its prefix cache from them; None: it publishes none."""
    adapter_rest_s: float = 0.0
    """Seconds after `remove_adapter` for which it may still read the adapter's folder."""
    transfer: str = ""
    """The backend of vLLM's weight transfer that it was started with; empty: it is no `TransferEngine`."""
    transfer_ranks: int = 0
    """How many of its processes join a trainer's group."""
    drafts: bool = False
    """Whether it is a `DraftEngine`."""


class Engine(Protocol):
    """An inference engine, as its host drives it. All methods run on the host's event loop."""

    @property
    def description(self) -> EngineDescription:
        """The engine's description of itself."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that generate the next token."""

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        """Continue the prompt `token_ids`, int32 [P]. Cancelling the call aborts the generation.

        Args:
            token_ids: the prompt.
            sampling: how tokens are drawn. An engine may also end at `sampling.stop`, at the earliest with the token
                that completes the text; the agent loop cuts what an engine generated beyond it.
            stop_token_ids: all ids that end the turn, including those of `sampling`.
            job_id: the job of the turn, for the engine's log.

        An engine whose description offers more also has the keyword argument `wanted`, a `Wanted`; its host passes it
        only where a request asks for something.

        Raises:
            EngineFailed: the prompt is empty, holds an unknown id, or leaves no room in the context; or the engine
                returned an error, a malformed answer or none.
        """

    async def begin_update(self, mode: UpdateMode) -> None:
        """Stop generating until the update is ended, because the weights are about to change.

        Returns when nothing is being generated; later requests wait. Does nothing if an update has begun already. If
        the call fails or is cancelled, the engine continues as before.

        Args:
            mode: what happens to running generations. `keep`: they pause between two tokens until the update is ended,
                and each token is recorded with the version that generated it. `drain`: they finish before this returns.
                `abort`: they end at once, with `finish_reason` `abort`.

        Raises:
            EngineFailed: the engine could not stop.
        """

    async def end_update(self, weight_version: int | None) -> None:
        """Resume generating, and discard results computed with other weights; also if no update was begun.

        Args:
            weight_version: of the weights that the engine has now; None: they are unchanged.

        Raises:
            EngineFailed: the engine could not resume; the call may be repeated.
        """

    async def update_weights(self, path: Path, weight_version: int, mode: UpdateMode) -> float | None:
        """Serve the weights at `path` from the next token on: begin an update unless one has begun, load, and end it.

        The engine resumes in every case. Return for how many seconds it was stopped; None: for the whole call.

        Raises:
            InvalidWeights: they cannot be used; nothing has changed.
            EngineFailed: the engine does not support new weights, or failed during the update.
        """

    async def set_weight_version(self, weight_version: int) -> None:
        """Set the version of the weights from the next token on, after they were changed by other means.

        Raises:
            EngineFailed: the engine is gone.
        """

    async def check_health(self) -> None:
        """Ask the engine whether it can serve; called with every heartbeat, so it must be cheap.

        Raises:
            EngineFailed: it cannot serve now; with `fatal=True`, it never will, and the host should exit.
        """

    async def close(self) -> None:
        """Abort running generations and free the engine's resources. May be called again."""


class KvEngine(Engine, Protocol):
    """An engine whose description has `kv`."""

    def kv_figures(self, now: float) -> KvFigures | None:
        """Return the state of the KV cache since the last call; None: there are no figures of this time.

        Called with every heartbeat, so it must be cheap.

        Args:
            now: the time in seconds, of `time.monotonic`.
        """


class TransferEngine(Engine, Protocol):
    """An engine whose description has `transfer`: its processes take weights from a group that a trainer makes."""

    async def transfer(self, call: TransferCall, info: dict[str, Any], limit_s: float) -> None:
        """Do one call of a transfer, between `begin_update` and `end_update`.

        After a call that failed, a new `init` begins a new transfer. If the update ends and no transfer was finished
        after an `update`, the engine is lost: its weights are of two versions.

        Args:
            call: `init` joins a group, `update` takes tensors from it, `finish` puts them into use, `leave` leaves the
                group.
            info: as vLLM's method of that name expects it.
            limit_s: after these seconds the engine is lost, since its processes wait for the trainer.

        Raises:
            EngineFailed: the call failed.
        """


class DraftEngine(Engine, Protocol):
    """An engine whose description has `drafts`: a draft model of its own proposes tokens, and takes new weights too."""

    async def update_weights(
        self, path: Path, weight_version: int, mode: UpdateMode, draft: Path | None = None
    ) -> float | None:
        """Do as `Engine.update_weights`; load in the same pause the folder `draft` into the draft model.

        Args:
            path: of the weights.
            weight_version: their version.
            mode: as in `begin_update`.
            draft: of the draft model's weights, a checkpoint with its tensors; None: it keeps those that it has.

        Raises:
            InvalidWeights: one of the folders cannot be used; nothing has changed.
            EngineFailed: as `Engine.update_weights`.
        """


class ScoringEngine(Engine, Protocol):
    """An engine whose description has `scores`."""

    async def score(
        self, token_ids: NDArray[np.int32], top: int, job_id: str, adapter: tuple[str, int] | None = None
    ) -> Scores:
        """Score the text `token_ids`, int32 [T], in one forward pass.

        The log-probs are the model's own, at temperature 1. Cancelling the call stops the computation.

        Args:
            token_ids: the text.
            top: how many of the likeliest tokens to return for each position, from 0.
            job_id: the job of the text, for the engine's log.
            adapter: as in `Wanted`; the scores then have its version. Only an `AdapterEngine` gets one.

        Raises:
            EngineFailed: the text is empty, too long, or holds an unknown id; `top` is over a limit of the engine; or
                the engine failed.
        """


class AdapterEngine(Engine, Protocol):
    """An engine with `adapter_slots`: it generates with adapters on its weights, and with the weights alone.

    `generate` takes `wanted.adapter`; its spans then have the adapter's version. It raises `EngineFailed` if this
    version is not loaded.
    """

    async def load_adapter(self, model: str, version: int, path: Path) -> None:
        """Load one version of a PEFT LoRA adapter; others generate meanwhile.

        Args:
            model: the adapter's name.
            version: of its weights, new for this name.
            path: its folder, which must stay unchanged until the adapter is removed, and for `adapter_rest_s` longer. A
                version that is removed and loaded again needs another path: engines cache results by path.

        Raises:
            InvalidWeights: it cannot be used with this engine's weights; nothing has changed.
            EngineFailed: the engine failed.
        """

    async def remove_adapter(self, model: str, version: int) -> None:
        """Forget a version that no running request uses. An unknown version is ignored.

        Raises:
            EngineFailed: the engine failed.
        """


class Generator(Protocol):
    """Generates the policy's next turn for the agent loop: an engine client bound to one job and its backend."""

    async def __call__(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], rows_known: int = 0
    ) -> Generation:
        """Continue the prompt `token_ids`, int32 [P]; see `Engine.generate` and `Wanted`."""


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


def check_scored(token_ids: NDArray[np.int32], top: int, description: EngineDescription) -> None:
    """Raise `EngineFailed` (`refused`) if a text cannot be scored: see `check_prompt`, or `top` is over a limit."""
    check_prompt(token_ids, description)
    most = min(SCORES_TOP_LIMIT, description.vocabulary or SCORES_TOP_LIMIT)
    if not 0 <= top <= most:
        raise EngineFailed(f"top={top}: a position has 0 to {most} likeliest tokens", refused=True)


def checked_scores(scores: Scores, tokens: int, top: int, vocabulary: int = 0) -> Scores:
    """Return the scores of a text if they are valid, with the first token's as `Scores` says.

    Args:
        scores: the answer of an engine.
        tokens: of the text.
        top: as requested.
        vocabulary: ids must be below this; 0: not known.

    Raises:
        EngineFailed: an array has the wrong type or shape, an id is outside the vocabulary, or a log-prob is not one;
            (`refused`) a token has the probability 0, whose log-prob is no number.
    """
    wanted = {"logprobs": ("f", (tokens,)), "top_ids": ("iu", (tokens, top)), "top_logprobs": ("f", (tokens, top))}
    for name, (kinds, shape) in wanted.items():
        array = np.asarray(getattr(scores, name))
        if array.shape != shape or array.dtype.kind not in kinds:
            raise EngineFailed(f"the engine scored a text with {name} {array.dtype} {array.shape}, not {shape}")
    first, ids = first_scores(top), scores.top_ids[1:]
    if ids.size and not 0 <= ids.min() <= ids.max() < (vocabulary or np.inf):
        raise EngineFailed(f"the engine scored a text with token ids outside of 0 to {vocabulary - 1}")
    logprobs = np.concatenate([scores.logprobs[1:], scores.top_logprobs[1:].ravel()])
    if not bool(np.all(logprobs <= 1e-3)):  # NaN fails every comparison
        raise EngineFailed("the engine scored a text with a log-prob that is not a logarithm of a probability")
    if bool(np.any(logprobs <= NO_LOGPROB)):  # vLLM's servers give this number for minus infinity
        raise EngineFailed(
            "the engine scored a text with a log-prob that is not a logarithm of a probability above 0", refused=True
        )
    return Scores(
        np.concatenate([first.logprobs, scores.logprobs[1:]], dtype=np.float32),
        np.concatenate([first.top_ids, ids], dtype=np.int32, casting="unsafe"),
        np.concatenate([first.top_logprobs, scores.top_logprobs[1:]], dtype=np.float32),
        index(scores.weight_version),
    )


def whole_span(count: int, weight_version: int) -> tuple[VersionSpan, ...]:
    """Return one span of this version over all tokens."""
    return (VersionSpan(weight_version, 0, count),) if count else ()


def as_plain(generation: Generation, prompt_tokens: int) -> Generation:
    """Return an engine's generation with arrays of the right types and Python's own numbers.

    Engines of other packages may use NumPy's integers, which messages cannot hold.

    Raises:
        EngineFailed: a value has the wrong type.
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
        raise EngineFailed(f"the engine gave version spans or cached_tokens that are not integers: {error}") from error
    return Generation(
        token_ids.astype(np.int32),
        logprobs.astype(np.float32),
        spans,
        reason,
        min(max(cached_tokens, 0), prompt_tokens),
        {name: np.ascontiguousarray(array) for name, array in generation.records.items()},
    )


def checked(generation: Generation, max_tokens: int, vocabulary: int = 0) -> Generation:
    """Return a generation if it is valid.

    Args:
        generation: the answer of an engine of another package, or of a server.
        max_tokens: the limit of the request.
        vocabulary: ids must be below this; 0: not known.

    Raises:
        EngineFailed: the numbers of ids and log-probs differ, exceed the limit or are 0, an id is outside the
            vocabulary, a log-prob is NaN or above 0, or the version spans do not cover the tokens.
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
        raise EngineFailed("the engine gave a log-prob that is not a logarithm of a probability")
    end = 0
    for span in generation.spans:
        if span.start != end or span.end <= span.start:
            break
        end = span.end
    if end != count or len(generation.spans) > SPAN_LIMIT:
        raise EngineFailed("the engine's weight versions do not match the tokens that it generated")
    return generation
