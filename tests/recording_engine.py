"""An embedded engine that also gives experts, which anybody can compute from the tokens: see `experts_of`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import NOTHING_MORE
from prorl_zmq.inference.records import rows_wanted
from prorl_zmq.wire.records import EXPERTS, RECORD_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.inference.engine import Generation, Wanted
    from prorl_zmq.wire.messages.jobs import Sampling

LAYERS, CHOSEN = 48, 8
"""384 bytes a token, as Qwen3-30B-A3B has."""


def experts_of(token_ids: NDArray[np.int32], first: int = 0) -> NDArray[np.uint8]:
    """Return a route for each token of a segment, by its id and its place, uint8 [T, layers, k]."""
    places = np.arange(first, first + len(token_ids), dtype=np.int64)
    base = (token_ids.astype(np.int64) * 7 + places * 13)[:, None, None]
    layers, ranks = np.arange(LAYERS)[None, :, None], np.arange(CHOSEN)[None, None, :]
    return ((base + layers * 5 + ranks * 3) % 128).astype(np.uint8)


class RecordingEngine(EmbeddedEngine):
    """Gives all records; notes from which row on each request wanted experts."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(base_policy())
        self._description = replace(self._description, records=RECORD_NAMES)
        self._layers = layers
        self.wanted: list[tuple[str, int, int]] = []
        """Of each request: the job, the prompt's tokens, and the rows known."""

        self.aborts = 0
        """How many generations end for new weights after their fourth token."""

    def _step(self) -> None:
        super()._step()
        for running in self._running:
            if self.aborts and len(running.logprobs) >= 4:
                running.end("abort")
                self.aborts -= 1
                self._weight_version += 1

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        job_id: str,
        wanted: Wanted = NOTHING_MORE,
    ) -> Generation:
        done = await super().generate(token_ids, sampling, stop_token_ids, job_id, wanted)
        if EXPERTS not in wanted.record:
            return done
        self.wanted.append((job_id, len(token_ids), wanted.rows_known))
        routes = experts_of(np.concatenate([token_ids, done.token_ids])[:-1])[:, : self._layers]
        return replace(done, records={**done.records, **rows_wanted(routes, 0, wanted.rows_known)})
