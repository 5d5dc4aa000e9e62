"""The embedded engine: serves a `Policy` by continuous batching, as large engines do, on the host's event loop.

One task decodes while anything runs: each step takes all running generations as they are, runs one forward pass, draws
one token for each, and gives the loop back. So requests join and leave between any two tokens, and so do new weights:
`update_weights` swaps the policy between two steps, and each token is noted with the version that made it. While an
update is begun no step is made. Stop texts are left to the agent loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import EngineFailed, InvalidWeights
from ..system.threads import run_aside
from ..wire.messages.backends import ChatSettings
from ..wire.messages.engines import VersionSpan
from .base_policy import build_base_policy
from .engine import EngineDescription, Generation
from .policy import Policy, draw
from .tokenizer import PAD, VOCABULARY_SIZE
from .truncation import truncated, truncates

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ..wire.messages.engines import FinishReason, UpdateMode
    from ..wire.messages.jobs import Sampling

CONTEXT_LIMIT = 32_768
"""Most tokens of a prompt and its answer together. The window slides, so the limit only keeps requests finite."""

MAX_IN_FLIGHT = 64
"""Generations at once beyond which each is noticeably slower."""

LOAD_S = 60.0
"""Longest reading of new weights: a file on a network may hang, and the updates behind it must not."""


@dataclass(slots=True, eq=False)
class _Running:
    """A generation under way."""

    tokens: NDArray[np.int32]
    """int32: the window's last part of the prompt, then room for the answer."""
    end: int
    """Where the answer goes on in `tokens`."""
    sampling: Sampling
    random: np.random.Generator
    stop_token_ids: frozenset[int]
    done: asyncio.Future[Generation]
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Where in the answer each weight version begins: (version, start)."""


class EmbeddedEngine:
    """Implements `engine.Engine` with a `Policy` in this process.

    Args:
        policy: what to serve; not changed by the engine, and must not be by others.
        weight_version: the policy's version.
        model: what the policy is called.
    """

    def __init__(self, policy: Policy, weight_version: int = 0, model: str = "embedded") -> None:
        self._policy = policy
        self._model = model
        self._weight_version = weight_version
        self._running: list[_Running] = []
        self._decoding: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._admits = asyncio.Event()
        """Unset from the begin of an update until its end: what comes, waits."""
        self._admits.set()
        self._steps = asyncio.Event()
        """Unset while an update is begun: what runs, pauses."""
        self._steps.set()
        self._idle = asyncio.Event()
        """Set while nothing runs."""
        self._idle.set()
        self._closed = False

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token will come from."""
        return self._weight_version

    @property
    def description(self) -> EngineDescription:
        """What it serves; log-probs are of the distribution that was sampled from."""
        vocabulary = self._policy.shape.vocabulary
        return EngineDescription(
            self._model, ChatSettings(), CONTEXT_LIMIT, vocabulary, MAX_IN_FLIGHT, "processed_logprobs"
        )

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        job_id: str,  # noqa: ARG002 - no state is kept per job
    ) -> Generation:
        """Continue the prompt `token_ids`, int32 [P]; see `Engine.generate`."""
        while not self._admits.is_set():
            await self._admits.wait()
        self._check_prompt(token_ids)
        window = self._policy.shape.window
        limit = min(sampling.max_tokens, CONTEXT_LIMIT - len(token_ids))
        tokens = np.full(window + limit, PAD, np.int32)
        last = token_ids[-window:]
        tokens[window - len(last) : window] = last
        running = _Running(
            tokens,
            window,
            sampling,
            np.random.default_rng(sampling.seed),
            frozenset(stop_token_ids),
            asyncio.get_running_loop().create_future(),
        )
        self._running.append(running)
        self._idle.clear()
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode(), name="decode")
            self._decoding.add_done_callback(self._decoding_ended)
        try:
            return await running.done
        finally:
            if running in self._running:
                self._running.remove(running)

    async def begin_update(self, mode: UpdateMode) -> None:
        """Make no further step; see `Engine.begin_update`."""
        if not self._steps.is_set():
            return
        self._admits.clear()
        if mode == "drain":
            try:
                await self._idle.wait()
            except BaseException:
                self._admits.set()
                raise
        elif mode == "abort":
            for running in self._running:
                self._end(running, "abort")
        if not self._closed:
            self._steps.clear()

    async def end_update(self, weight_version: int | None) -> None:
        """Make steps again; see `Engine.end_update`."""
        if weight_version is not None:
            self._weight_version = weight_version
        self._steps.set()
        self._admits.set()

    async def update_weights(self, path: Path, weight_version: int, mode: UpdateMode) -> None:
        """Serve the weights at `path` from the next token on; see `Engine.update_weights`.

        Raises:
            InvalidWeights: they cannot be used; nothing has changed.
        """
        async with self._updating:  # in the order in which they came, however long each file takes
            served = None
            try:
                async with asyncio.timeout(LOAD_S):
                    policy = await run_aside(Policy.load, path, self._policy.shape)
                await self.begin_update(mode)
                self._policy, served = policy, weight_version
            except TimeoutError:
                raise InvalidWeights(f"{path} could not be read within {LOAD_S:g} s", path=str(path)) from None
            finally:
                await self.end_update(served)

    async def set_weight_version(self, weight_version: int) -> None:
        """Call the weights this from the next token on; they are what they are."""
        self._weight_version = weight_version

    async def check_health(self) -> None:
        """Say nothing: what runs in this process is well if this runs."""

    async def close(self) -> None:
        """Abort what runs: its callers get `EngineFailed`. May be called again."""
        self._closed = True
        self._steps.set()
        self._admits.set()
        if self._decoding is not None:
            self._decoding.cancel()
            await asyncio.wait([self._decoding])

    async def _decode(self) -> None:
        while self._running:
            if self._steps.is_set():
                self._step(self._running)
            self._running = [running for running in self._running if not running.done.done()]
            await (asyncio.sleep(0) if self._steps.is_set() else self._steps.wait())
        self._idle.set()
        self._decoding = None  # here, so that no request can join a task that has ended

    def _step(self, batch: Sequence[_Running]) -> None:
        """Draw one more token for each generation of the batch."""
        window = self._policy.shape.window
        contexts = np.stack([running.tokens[running.end - window : running.end] for running in batch])
        temperatures = np.array([running.sampling.temperature for running in batch], np.float64)
        uniforms = np.array([running.random.random() for running in batch])
        logits = self._policy.logits(contexts)
        for row, running in enumerate(batch):
            if truncates(running.sampling):
                logits[row] = truncated(logits[row], running.sampling)
        tokens, logprobs = draw(logits, temperatures, uniforms)
        for running, token, logprob in zip(batch, tokens.tolist(), logprobs.tolist(), strict=True):
            if not running.versions or running.versions[-1][0] != self._weight_version:
                running.versions.append((self._weight_version, running.end - window))
            running.tokens[running.end] = token
            running.logprobs.append(logprob)
            running.end += 1
            if token in running.stop_token_ids:
                self._end(running, "stop")
            elif running.end == len(running.tokens):
                self._end(running, "length")

    def _end(self, running: _Running, finish_reason: FinishReason) -> None:
        if running.done.done():
            return
        window = self._policy.shape.window
        ends = [*(start for _, start in running.versions), running.end - window][1:]
        running.done.set_result(
            Generation(
                running.tokens[window : running.end].copy(),
                np.array(running.logprobs, np.float32),
                tuple(VersionSpan(*at, end) for at, end in zip(running.versions, ends, strict=True)),
                finish_reason,
            )
        )

    def _decoding_ended(self, task: asyncio.Task[None]) -> None:
        """Leave nobody waiting when decoding was ended by `close` or by a fault of ours."""
        fault = None if task.cancelled() else task.exception()
        if fault is None and not task.cancelled():
            return
        self._decoding = None
        reason = f"decoding failed: {type(fault).__name__}: {fault}" if fault else "the engine was closed"
        for running in self._running:
            if not running.done.done():
                running.done.set_exception(EngineFailed(reason, unreachable=True))
        self._running = []
        self._idle.set()

    def _check_prompt(self, token_ids: NDArray[np.int32]) -> None:
        vocabulary = self._policy.shape.vocabulary
        if self._closed:
            raise EngineFailed("the engine was closed", unreachable=True)
        if not len(token_ids):
            raise EngineFailed("the prompt is empty; it needs at least one token", refused=True)
        if token_ids.min() < 0 or token_ids.max() >= vocabulary:
            raise EngineFailed(
                f"the prompt holds a token id outside of 0 to {vocabulary - 1}; is the chat format right?",
                refused=True,
            )
        if len(token_ids) >= CONTEXT_LIMIT:
            raise EngineFailed(
                f"a prompt of {len(token_ids)} tokens leaves no room in a context of {CONTEXT_LIMIT}", refused=True
            )


def load_embedded_engine(model: Path | None, weight_version: int = 0) -> EmbeddedEngine:
    """Give an engine with the policy of a file (.npz); None: with the base policy, which takes some seconds.

    Raises:
        InvalidWeights: the model cannot be used.
    """
    policy = build_base_policy() if model is None else Policy.load(model)
    if policy.shape.vocabulary != VOCABULARY_SIZE:
        raise InvalidWeights(
            f"{model} has {policy.shape.vocabulary} tokens, the embedded chat format {VOCABULARY_SIZE}", path=str(model)
        )
    return EmbeddedEngine(policy, weight_version, "base policy" if model is None else str(model))
