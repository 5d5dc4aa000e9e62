"""The base of engines that compute in this process: continuous batching on the host's event loop.

One task decodes while any generation runs: each step draws one token for every running generation, and yields to the
loop. So requests and new weights take effect between any two tokens, and each token is recorded with the version that
generated it. No steps run while an update is in progress. The agent loop handles stop texts.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.scores import Scores, first_scores, joined_scores
from ..errors import EngineFailed
from ..wire.messages.engines import VersionSpan
from ..wire.records import EXPERTS, NO_RECORDS, Recorded
from .checkpoint import read_in_time
from .engine import NOTHING_MORE, EngineDescription, Generation, Wanted, check_prompt, check_scored
from .policy import draw, log_softmax
from .records import asked_records, mask_arrays, top_arrays
from .truncation import truncated, truncates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ..wire.messages.engines import FinishReason, UpdateMode
    from ..wire.messages.jobs import Sampling

LOAD_S = 60.0
"""Longest reading of new weights: a file on a network may hang, and must not block later updates."""


@dataclass(slots=True, eq=False)
class Running:
    tokens: list[int]
    """The prompt, then the answer."""
    prompt: int
    limit: int
    """Length of `tokens` at which the answer ends."""
    sampling: Sampling
    random: np.random.Generator
    stop_token_ids: frozenset[int]
    done: asyncio.Future[Generation]
    job_id: str
    wanted: Wanted = NOTHING_MORE
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Where in the answer each weight version begins: (version, start)."""
    asked: Recorded = NO_RECORDS
    """What `wanted` has to record."""
    tops: list[tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=list)
    """Per token of the answer, the ids and log-probs of the likeliest."""
    supports: list[NDArray[Any]] = field(default_factory=list)
    routes: list[NDArray[Any]] = field(default_factory=list)
    """[n, layers, k] each, of consecutive positions from `wanted.rows_known` on."""
    rows: int = 0
    """Positions from 0 on whose routes are here or known."""

    def note_distribution(self, logits: NDArray[np.float32]) -> None:
        """Record from which logits, float32 [vocabulary] and truncated, the next token is drawn."""
        if self.asked.mask:
            self.supports.append(np.flatnonzero(np.isfinite(logits)))
        if self.asked.top:
            logprobs = log_softmax(logits[None], self.sampling.temperature or 1.0)[0]
            likeliest = np.argpartition(-logprobs, self.asked.top - 1)[: self.asked.top]
            ids = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]
            self.tops.append((ids, logprobs[ids]))

    def note_routes(self, start: int, routes: NDArray[Any]) -> None:
        """Record the routes, [n, layers, k], of the tokens from `start` on, except for rows that are noted or known.

        Those that are recomputed with new weights are not the ones that the tokens were generated with.
        """
        new = routes[max(self.rows - start, 0) :]
        if len(new):
            self.routes.append(new)
            self.rows = start + len(routes)

    def records(self) -> dict[str, NDArray[Any]]:
        count = len(self.logprobs)
        found: dict[str, NDArray[Any]] = {}
        if self.asked.top:
            tops = np.array(self.tops).reshape(count, 2, self.asked.top)
            found |= top_arrays(tops[:, 0], tops[:, 1])
        if self.asked.mask:
            found |= mask_arrays(self.supports)
        if self.routes:
            # The last token was an input only if an update ended the turn.
            found[EXPERTS] = np.concatenate(self.routes)[: len(self.tokens) - 1 - self.wanted.rows_known]
        return found

    def add(self, token: int, logprob: float, weight_version: int) -> None:
        if not self.versions or self.versions[-1][0] != weight_version:
            self.versions.append((weight_version, len(self.logprobs)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_token_ids:
            self.end("stop")
        elif len(self.tokens) == self.limit:
            self.end("length")

    def end(self, finish_reason: FinishReason) -> None:
        if self.done.done():
            return
        ends = [*(start for _, start in self.versions), len(self.logprobs)][1:]
        self.done.set_result(
            Generation(
                np.array(self.tokens[self.prompt :], np.int32),
                np.array(self.logprobs, np.float32),
                tuple(VersionSpan(*at, end) for at, end in zip(self.versions, ends, strict=True)),
                finish_reason,
                records=self.records(),
            )
        )


def chances_of(batch: Sequence[Running]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each generation's temperature and its next random number from 0 to 1."""
    temperatures = [running.sampling.temperature for running in batch]
    return np.array(temperatures, np.float64), np.array([running.random.random() for running in batch])


class LocalEngine(ABC):
    """Implements `engine.Engine` except for the model: a subclass computes a step, and reads and installs weights."""

    def __init__(self, description: EngineDescription, weight_version: int) -> None:
        self._description = description
        self._weight_version = weight_version
        self._running: list[Running] = []
        """In order of arrival."""
        self._decoding: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._admits = asyncio.Event()
        """Unset from the begin of an update until its end: new requests wait."""
        self._admits.set()
        self._steps = asyncio.Event()
        """Unset during an update: generations pause."""
        self._steps.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @abstractmethod
    def _step(self) -> None:
        """Draw one more token (`_draw`) for the generations in `_running` that have room; all of them are under way."""

    @abstractmethod
    def _read_weights(self, path: Path) -> Any:
        """Read and check weights; runs in its own thread.

        Raises:
            InvalidWeights: they cannot be used.
        """

    @abstractmethod
    def _take_weights(self, weights: Any) -> None: ...

    def _score_parts(self, token_ids: NDArray[np.int32], top: int, adapter: tuple[str, int] | None) -> Iterator[Scores]:
        """Yield the scores of a text from its second token on, in parts: generations continue between two of them.

        Only called if the description has `scores`. The parts are of the weights that the engine has at the first one.
        """
        raise NotImplementedError

    def _on_new_weights(self) -> None:  # noqa: B027 - not every engine has any
        """Drop results computed with other weights; called before the first step with new ones."""

    def _check_adapter(self, adapter: tuple[str, int] | None) -> None:  # noqa: B027 - most engines have none
        """Raise `EngineFailed` if an adapter is not loaded."""

    @property
    def description(self) -> EngineDescription:
        return self._description

    @property
    def weight_version(self) -> int:
        return self._weight_version

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        job_id: str,
        wanted: Wanted = NOTHING_MORE,
    ) -> Generation:
        await self._admitted()
        check_prompt(token_ids, self._description)
        asked = asked_records(wanted, len(token_ids), sampling, self._description)
        self._check_adapter(wanted.adapter)
        running = Running(
            token_ids.tolist(),
            len(token_ids),
            min(len(token_ids) + sampling.max_tokens, self._description.context_tokens),
            sampling,
            np.random.default_rng(sampling.seed),
            frozenset(stop_token_ids),
            asyncio.get_running_loop().create_future(),
            job_id,
            wanted,
            asked=asked,
            rows=wanted.rows_known,
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

    async def score(
        self,
        token_ids: NDArray[np.int32],
        top: int,
        job_id: str,  # noqa: ARG002
        adapter: tuple[str, int] | None = None,
    ) -> Scores:
        await self._admitted()
        check_scored(token_ids, top, self._description)
        self._check_adapter(adapter)
        parts, version = [first_scores(top)], self._weight_version if adapter is None else adapter[1]
        for part in self._score_parts(token_ids, top, adapter):
            parts.append(part)
            await asyncio.sleep(0)
            self._check_open()
        return replace(joined_scores(parts), weight_version=version)

    async def begin_update(self, mode: UpdateMode) -> None:
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
                running.end("abort")
        if not self._closed:
            self._steps.clear()

    async def end_update(self, weight_version: int | None) -> None:
        if weight_version is not None:
            self._weight_version = weight_version
            self._on_new_weights()
        self._steps.set()
        self._admits.set()

    async def update_weights(self, path: Path, weight_version: int, mode: UpdateMode) -> float:
        async with self._updating:  # in the order of the calls, however long each file takes
            served = None
            try:
                weights = await read_in_time(LOAD_S, self._read_weights, path)
                began = time.monotonic()
                await self.begin_update(mode)
                self._take_weights(weights)
                served = weight_version
            finally:
                await self.end_update(served)
            return time.monotonic() - began

    async def set_weight_version(self, weight_version: int) -> None:
        self._weight_version = weight_version

    async def check_health(self) -> None:  # noqa: B027
        """Do nothing: an engine in this process is healthy if this runs."""

    async def close(self) -> None:
        self._closed = True
        self._steps.set()
        self._admits.set()
        if self._decoding is not None:
            self._decoding.cancel()
            await asyncio.wait([self._decoding])

    async def _admitted(self) -> None:
        """Wait until no update is in progress."""
        while not self._admits.is_set():
            await self._admits.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineFailed("the engine was closed", unreachable=True)

    def _draw(self, batch: Sequence[Running], logits: NDArray[np.float32]) -> None:
        """Draw the next token of each generation from its row of `logits`, float32 [B, vocabulary]; modifies them."""
        for row, running in enumerate(batch):
            if truncates(running.sampling):
                logits[row] = truncated(logits[row], running.sampling)
            running.note_distribution(logits[row])
        tokens, logprobs = draw(logits, *chances_of(batch))
        self._add(batch, tokens.tolist(), logprobs.tolist())

    def _add(self, batch: Sequence[Running], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for running, token, logprob in zip(batch, tokens, logprobs, strict=True):
            adapter = running.wanted.adapter
            running.add(token, logprob, self._weight_version if adapter is None else adapter[1])

    async def _decode(self) -> None:
        while self._running:
            if self._steps.is_set():
                self._drop_done()
                if self._running:
                    self._step()
            self._drop_done()
            await (asyncio.sleep(0) if self._steps.is_set() else self._steps.wait())
        self._idle.set()
        self._decoding = None  # here, so that no request can join a task that has ended

    def _drop_done(self) -> None:
        self._running = [running for running in self._running if not running.done.done()]

    def _decoding_ended(self, task: asyncio.Task[None]) -> None:
        """Fail the running generations if `close` or a fault ended decoding."""
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
