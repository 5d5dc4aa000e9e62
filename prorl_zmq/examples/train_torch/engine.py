"""The engine: serves a `Model` by continuous batching with a cache of keys and values, in a process of its own.

Each running generation has a row of the cache, and the scores of its next token wait with it. A step draws one token
for every row, ends those that are done, fills their rows with the last ones, and runs one forward pass for the rest; so
requests join and leave between any two tokens, and so do new weights. When weights change under running generations
the cache is recomputed from the tokens so far: a stale one would make log-probs of neither version. So the log-prob
of each token is what the trainer computes for it with the weights of that token's version.

    python -m prorl_zmq.examples.train_torch.engine --weights FILE --tokenizer DIR --run-dir DIR

registers it at the backend broker of the service in that run folder; it ends with its parent, and on SIGTERM. Left out
on purpose: a prefix cache between the turns of a job, since conversations are short, and stop texts, which the agent
loop does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ...inference.engine import EngineDescription
from ...inference.local_engine import LocalEngine, Running
from .model import KeyValueCache, Model
from .tokenizer import chat_settings
from .weights import read_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ...wire.messages.backends import ChatSettings

ROWS = 32
"""Generations at once; more wait for a row."""


class TorchEngine(LocalEngine):
    """Implements `inference.engine.Engine` with a `Model`, which is the engine's from now on."""

    def __init__(self, model: Model, chat: ChatSettings, weight_version: int = 0) -> None:
        shape = model.shape
        super().__init__(
            EngineDescription("train_torch", chat, shape.context, shape.vocabulary, ROWS, "processed_logprobs"),
            weight_version,
        )
        self._model = model
        self._cache = KeyValueCache.empty(shape, ROWS, model.device)
        self._rows: list[Running] = []
        self._scores = np.zeros((0, shape.vocabulary), np.float32)
        """float32 [rows, vocabulary]: of each row's next token."""

    def _step(self) -> None:
        """Give free rows to those that wait, and draw one more token for each row."""
        self._free_rows()
        seated = set(self._rows)
        waiting = [running for running in self._running if running not in seated]
        joining = waiting[: ROWS - len(self._rows)]
        if joining:
            self._scores = np.concatenate([self._scores, self._read(joining, len(self._rows))])
            self._rows += joining
        self._draw(self._rows, self._scores)
        self._free_rows()
        if self._rows:
            device = self._model.device
            last = torch.tensor([running.tokens[-1] for running in self._rows], device=device)
            lengths = torch.tensor([len(running.tokens) - 1 for running in self._rows], device=device)
            with torch.inference_mode():
                self._scores = self._model.decode(last, lengths, self._cache).cpu().numpy()

    def _on_new_weights(self) -> None:
        self._free_rows()
        self._scores = self._read(self._rows, 0)

    def _read_weights(self, path: Path) -> dict[str, torch.Tensor]:
        return read_weights(path, self._model)

    def _take_weights(self, weights: dict[str, Any]) -> None:
        self._model.load_state_dict(weights)

    def _free_rows(self) -> None:
        """Free the rows of what is done or was cancelled; the last rows move into their places."""
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

    def _read(self, conversations: Sequence[Running], first: int) -> NDArray[np.float32]:
        """Compute the cache of conversations from row `first` on; return the scores of their next tokens."""
        if not conversations:
            return np.zeros((0, self._model.shape.vocabulary), np.float32)
        lengths = [len(running.tokens) for running in conversations]
        token_ids = pad_sequence([torch.tensor(running.tokens) for running in conversations], batch_first=True)
        with torch.inference_mode():
            device = self._model.device
            where = torch.tensor(lengths, device=device)
            scores = self._model.prefill(token_ids.to(device), where, self._cache, first)
        return np.asarray(scores.cpu().numpy())


async def load_engine(weights: Path, tokenizer: Path, weight_version: int, device: str) -> TorchEngine:
    model = Model().to(device)
    model.load_state_dict(read_weights(weights, model))
    return TorchEngine(model, chat_settings(tokenizer), weight_version)


def main() -> None:
    """Be the engine's host until SIGTERM."""
    import argparse
    from pathlib import Path

    from ...inference.hosting.host import HostOptions, run_engine_host
    from ...system.logs import start_logging

    parser = argparse.ArgumentParser(description="The engine of the train_torch example, which starts it.")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--run-dir", required=True, help="of the service whose backend broker it registers at")
    parser.add_argument("--weight-version", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    start_logging("engine", "text", "info")
    torch.set_num_threads(1)
    options = HostOptions(
        endpoint=f"ipc://{given.run_dir}/train_torch",
        backend_broker=f"ipc://{given.run_dir}/backend_broker",
        backend_id="train_torch",
    )
    run_engine_host(partial(load_engine, given.weights, given.tokenizer, given.weight_version, given.device), options)


if __name__ == "__main__":
    main()
