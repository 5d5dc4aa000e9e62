"""The engine: serves a `Model` by continuous batching with a cache of keys and values, in a process of its own.

Each running generation has a row of the cache, and the scores of its next token wait with it. A step draws one token
for every row, ends those that are done, fills their rows with the last ones, and runs one forward pass for the rest; so
requests join and leave between any two tokens, and so do new weights. When weights change under running generations
the cache is computed again from the tokens so far: a stale one would make log-probs of neither version. So the log-prob
of each token is what the trainer computes for it with the weights of that token's version.

    python -m prorl_zmq.examples.train_torch.engine --weights FILE --tokenizer DIR --run-dir DIR

registers it at the backend broker of the service in that run folder; it ends with its parent, and on SIGTERM. Left out
on purpose: a prefix cache between the turns of a job, since conversations are short, and stop texts, which the agent
loop does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...errors import EngineFailed, InvalidWeights
from ...inference.engine import EngineDescription, Generation
from ...inference.policy import draw
from ...inference.truncation import truncated, truncates
from ...system.threads import run_aside
from ...wire.messages.engines import VersionSpan
from .model import KeyValueCache, Model
from .tokenizer import chat_settings
from .weights import read_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ...wire.messages.backends import ChatSettings
    from ...wire.messages.engines import FinishReason, UpdateMode
    from ...wire.messages.jobs import Sampling

ROWS = 32
"""Generations at once; more wait for a row."""
LOAD_S = 60.0
"""Longest reading of new weights."""


@dataclass(slots=True, eq=False)
class _Running:
    """A generation under way, or waiting for a row."""

    tokens: list[int]
    """The prompt, then the answer."""
    prompt: int
    """Tokens of the prompt."""
    limit: int
    """Where the answer ends at the latest."""
    sampling: Sampling
    random: np.random.Generator
    stop_token_ids: frozenset[int]
    done: asyncio.Future[Generation]
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Where in the answer each weight version begins: (version, start)."""

    def generation(self, finish_reason: FinishReason) -> Generation:
        """Return what was generated."""
        ends = [*(start for _, start in self.versions), len(self.logprobs)][1:]
        return Generation(
            np.array(self.tokens[self.prompt :], np.int32),
            np.array(self.logprobs, np.float32),
            tuple(VersionSpan(*at, end) for at, end in zip(self.versions, ends, strict=True)),
            finish_reason,
        )


class TorchEngine:
    """Implements `inference.engine.Engine` with a `Model` in this process."""

    def __init__(self, model: Model, chat: ChatSettings, weight_version: int = 0) -> None:
        self._model = model
        self._chat = chat
        self._weight_version = weight_version
        self._cache = KeyValueCache.empty(model.shape, ROWS)
        self._rows: list[_Running] = []
        self._scores = np.zeros((0, model.shape.vocabulary), np.float32)
        """float32 [rows, vocabulary]: of each row's next token."""
        self._waiting: deque[_Running] = deque()
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
        shape = self._model.shape
        return EngineDescription("train_torch", self._chat, shape.context, shape.vocabulary, ROWS, "processed_logprobs")

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
        running = _Running(
            token_ids.tolist(),
            len(token_ids),
            min(len(token_ids) + sampling.max_tokens, self._model.shape.context),
            sampling,
            np.random.default_rng(sampling.seed),
            frozenset(stop_token_ids),
            asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(running)
        self._idle.clear()
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode(), name="decode")
            self._decoding.add_done_callback(self._decoding_ended)
        return await running.done  # cancelled, it is a future that is done: its row is given up with the next step

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
            for running in (*self._rows, *self._waiting):
                _end(running, "abort")
        if not self._closed:
            self._steps.clear()

    async def end_update(self, weight_version: int | None) -> None:
        """Make steps again, of a cache by the weights as they are; see `Engine.end_update`."""
        if weight_version is not None:
            self._weight_version = weight_version
            self._drop_done()
            self._scores = self._read(self._rows, 0)
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
                    weights = await run_aside(read_weights, path, self._model)
                await self.begin_update(mode)
                self._model.load_state_dict(weights)
                served = weight_version
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
        while self._rows or self._waiting:
            if self._steps.is_set():
                self._step()
            await (asyncio.sleep(0) if self._steps.is_set() else self._steps.wait())
        self._idle.set()
        self._decoding = None  # here, so that no request can join a task that has ended

    def _step(self) -> None:
        """Take in what waits, and draw one more token for each row."""
        self._drop_done()
        joining = [self._waiting.popleft() for _ in range(min(len(self._waiting), ROWS - len(self._rows)))]
        if joining:
            self._scores = np.concatenate([self._scores, self._read(joining, len(self._rows))])
            self._rows += joining
        if not self._rows:
            return
        for row, running in enumerate(self._rows):
            if truncates(running.sampling):
                self._scores[row] = truncated(self._scores[row], running.sampling)
        temperatures = np.array([running.sampling.temperature for running in self._rows], np.float64)
        uniforms = np.array([running.random.random() for running in self._rows])
        tokens, logprobs = draw(self._scores, temperatures, uniforms)
        for running, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not running.versions or running.versions[-1][0] != self._weight_version:
                running.versions.append((self._weight_version, len(running.logprobs)))
            running.tokens.append(token)
            running.logprobs.append(logprob)
            if token in running.stop_token_ids:
                _end(running, "stop")
            elif len(running.tokens) == running.limit:
                _end(running, "length")
        self._drop_done()
        if self._rows:
            last = torch.tensor([running.tokens[-1] for running in self._rows])
            lengths = torch.tensor([len(running.tokens) - 1 for running in self._rows])
            with torch.inference_mode():
                self._scores = self._model.decode(last, lengths, self._cache).numpy()

    def _drop_done(self) -> None:
        """Let go of what is done or was cancelled; the last rows take the places of those that are free."""
        self._waiting = deque(running for running in self._waiting if not running.done.done())
        kept = list(range(len(self._rows)))
        for row in range(len(self._rows) - 1, -1, -1):
            if self._rows[row].done.done():
                last = len(kept) - 1
                if row != last:
                    self._cache.move(last, row)
                    self._rows[row], kept[row] = self._rows[last], kept[last]
                kept.pop()
                self._rows.pop()
        self._scores = self._scores[kept]

    def _read(self, conversations: Sequence[_Running], first: int) -> NDArray[np.float32]:
        """Compute the cache of conversations from row `first` on; return the scores of what follows each."""
        if not conversations:
            return np.zeros((0, self._model.shape.vocabulary), np.float32)
        lengths = [len(running.tokens) for running in conversations]
        token_ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, running in enumerate(conversations):
            token_ids[row, : lengths[row]] = torch.tensor(running.tokens)
        with torch.inference_mode():
            scores = self._model.prefill(token_ids, torch.tensor(lengths), self._cache, first)
        return np.asarray(scores.numpy())

    def _decoding_ended(self, task: asyncio.Task[None]) -> None:
        """Leave nobody waiting when decoding was ended by `close` or by a fault of ours."""
        fault = None if task.cancelled() else task.exception()
        if fault is None and not task.cancelled():
            return
        self._decoding = None
        reason = f"decoding failed: {type(fault).__name__}: {fault}" if fault else "the engine was closed"
        for running in (*self._rows, *self._waiting):
            if not running.done.done():
                running.done.set_exception(EngineFailed(reason, unreachable=True))
        self._drop_done()
        self._idle.set()

    def _check_prompt(self, token_ids: NDArray[np.int32]) -> None:
        shape = self._model.shape
        if self._closed:
            raise EngineFailed("the engine was closed", unreachable=True)
        if not len(token_ids):
            raise EngineFailed("the prompt is empty; it needs at least one token", refused=True)
        if token_ids.min() < 0 or token_ids.max() >= shape.vocabulary:
            raise EngineFailed(
                f"the prompt holds a token id outside of 0 to {shape.vocabulary - 1}; is the chat format right?",
                refused=True,
            )
        if len(token_ids) >= shape.context:
            raise EngineFailed(
                f"a prompt of {len(token_ids)} tokens leaves no room in a context of {shape.context}", refused=True
            )


def _end(running: _Running, finish_reason: FinishReason) -> None:
    if not running.done.done():
        running.done.set_result(running.generation(finish_reason))


async def load_engine(weights: Path, tokenizer: Path, weight_version: int) -> TorchEngine:
    """Return an engine with the weights of a file.

    Raises:
        InvalidWeights: they cannot be used.
    """
    model = Model()
    model.load_state_dict(read_weights(weights, model))
    return TorchEngine(model, chat_settings(tokenizer), weight_version)


def main() -> None:
    """Be the engine's host until SIGTERM."""
    import argparse
    from pathlib import Path

    from ...inference.host import HostOptions, run_engine_host
    from ...system.logs import start_logging

    parser = argparse.ArgumentParser(description="The engine of the train_torch example, which starts it.")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--run-dir", required=True, help="of the service whose backend broker it registers at")
    parser.add_argument("--weight-version", type=int, default=0)
    given = parser.parse_args()
    start_logging("engine", "text", "info")
    torch.set_num_threads(1)
    options = HostOptions(
        endpoint=f"ipc://{given.run_dir}/train_torch",
        backend_broker=f"ipc://{given.run_dir}/backend_broker",
        backend_id="train_torch",
    )
    run_engine_host(partial(load_engine, given.weights, given.tokenizer, given.weight_version), options)


if __name__ == "__main__":
    main()
