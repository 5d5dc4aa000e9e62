"""The embedded engine: serves a `Policy` by continuous batching, as large engines do, on the host's event loop.

One task decodes while anything runs: each step takes all running generations as they are, runs one forward pass, draws
one token for each, and gives the loop back. So requests join and leave between any two tokens, and so do new weights:
`update_weights` swaps the policy between two steps, and each token is noted with the version that made it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np

from ..errors import EngineFailed, InvalidWeights
from ..messages import VersionSpan
from .engine import Generation
from .policy import Policy, PolicyShape, draw
from .tokenizer import PAD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ..messages import Sampling

CONTEXT_LIMIT = 32_768
"""Most tokens of a prompt and its answer together. The window slides, so the limit only keeps requests finite."""

LOAD_S = 60.0
"""Longest reading of new weights: a file on a network may hang, and the updates behind it must not."""


@dataclass(slots=True, eq=False)
class _Running:
    """A generation under way."""

    tokens: NDArray[np.int32]
    """int32: the window's last part of the prompt, then room for the answer."""
    end: int
    """Where the answer goes on in `tokens`."""
    temperature: float
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
    """

    def __init__(self, policy: Policy, weight_version: int = 0) -> None:
        self._policy = policy
        self._weight_version = weight_version
        self._running: list[_Running] = []
        self._decoding: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._closed = False

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token will come from."""
        return self._weight_version

    @property
    def chat_format(self) -> str:
        """`embedded`."""
        return "embedded"

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        job_id: str,  # noqa: ARG002 - no state is kept per job
    ) -> Generation:
        """Continue the prompt `token_ids`, int32 [P]; see `Engine.generate`."""
        self._check_prompt(token_ids)
        window = self._policy.shape.window
        limit = min(sampling.max_tokens, CONTEXT_LIMIT - len(token_ids))
        tokens = np.full(window + limit, PAD, np.int32)
        last = token_ids[-window:]
        tokens[window - len(last) : window] = last
        running = _Running(
            tokens,
            window,
            sampling.temperature,
            np.random.default_rng(sampling.seed),
            frozenset(stop_token_ids),
            asyncio.get_running_loop().create_future(),
        )
        self._running.append(running)
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode(), name="decode")
            self._decoding.add_done_callback(self._decoding_ended)
        try:
            return await running.done
        finally:
            if running in self._running:
                self._running.remove(running)

    async def update_weights(self, path: Path, weight_version: int) -> None:
        """Serve the weights at `path` from the next token on, in running generations too.

        Raises:
            InvalidWeights: they cannot be used; nothing has changed.
        """
        async with self._updating:  # in the order in which they came, however long each file takes
            try:
                async with asyncio.timeout(LOAD_S):
                    policy = await asyncio.wrap_future(_start_loading(path, self._policy.shape))
            except TimeoutError:
                raise InvalidWeights(f"{path} could not be read within {LOAD_S:g} s", path=str(path)) from None
            self._policy = policy
            self._weight_version = weight_version

    async def close(self) -> None:
        """Abort what runs: its callers get `EngineFailed`. May be called again."""
        self._closed = True
        if self._decoding is not None:
            self._decoding.cancel()
            await asyncio.wait([self._decoding])

    async def _decode(self) -> None:
        while self._running:
            self._step(self._running)
            self._running = [running for running in self._running if not running.done.done()]
            await asyncio.sleep(0)
        self._decoding = None  # here, so that no request can join a task that has ended

    def _step(self, batch: Sequence[_Running]) -> None:
        """Draw one more token for each generation of the batch."""
        window = self._policy.shape.window
        contexts = np.stack([running.tokens[running.end - window : running.end] for running in batch])
        temperatures = np.array([running.temperature for running in batch], np.float64)
        uniforms = np.array([running.random.random() for running in batch])
        tokens, logprobs = draw(self._policy.logits(contexts), temperatures, uniforms)
        for running, token, logprob in zip(batch, tokens.tolist(), logprobs.tolist(), strict=True):
            if not running.versions or running.versions[-1][0] != self._weight_version:
                running.versions.append((self._weight_version, running.end - window))
            running.tokens[running.end] = token
            running.logprobs.append(logprob)
            running.end += 1
            stopped = token in running.stop_token_ids
            if (stopped or running.end == len(running.tokens)) and not running.done.done():
                ends = [start for _, start in running.versions[1:]] + [running.end - window]
                running.done.set_result(
                    Generation(
                        running.tokens[window : running.end].copy(),
                        np.array(running.logprobs, np.float32),
                        tuple(VersionSpan(*at, end) for at, end in zip(running.versions, ends, strict=True)),
                        "stop" if stopped else "length",
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
                running.done.set_exception(EngineFailed(reason))
        self._running = []

    def _check_prompt(self, token_ids: NDArray[np.int32]) -> None:
        vocabulary = self._policy.shape.vocabulary
        if self._closed:
            raise EngineFailed("the engine was closed")
        if not len(token_ids):
            raise EngineFailed("the prompt is empty; it needs at least one token")
        if token_ids.min() < 0 or token_ids.max() >= vocabulary:
            raise EngineFailed(
                f"the prompt holds a token id outside of 0 to {vocabulary - 1}; is the chat format right?"
            )
        if len(token_ids) >= CONTEXT_LIMIT:
            raise EngineFailed(f"a prompt of {len(token_ids)} tokens leaves no room in a context of {CONTEXT_LIMIT}")


def _start_loading(path: Path, shape: PolicyShape) -> Future[Policy]:
    """Load in a thread of its own, which the process's end does not wait for, as it would for an executor's."""
    loaded: Future[Policy] = Future()
    loaded.set_running_or_notify_cancel()

    def load() -> None:
        try:
            loaded.set_result(Policy.load(path, shape))
        except BaseException as error:  # noqa: BLE001 - raised again where the future is awaited
            loaded.set_exception(error)

    Thread(target=load, name="load weights", daemon=True).start()
    return loaded
