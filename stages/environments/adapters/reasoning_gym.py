"""reasoning-gym: one question, one answer. `args`: `name` of the data set, `index`, `size`, and the data set's own.

Equal seeds and sizes make equal data sets, of which each worker keeps the last ones.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import reasoning_gym

if TYPE_CHECKING:
    from ..adapter import Opening, Step


@lru_cache(maxsize=32)
def _data_set(packed: str) -> Any:
    return reasoning_gym.create_dataset(**json.loads(packed))


class ReasoningGym:
    def open(self, args: dict[str, Any], seed: int | None) -> Opening:
        index = args.pop("index", 0)
        settings = {"size": max(index + 1, 1), "seed": seed or 0, **args}
        self._data = _data_set(json.dumps(settings, sort_keys=True))
        self._entry = self._data[index]
        return {"observations": {"main": self._entry["question"]}}

    def step(self, player: str, text: str) -> Step:
        answer = reasoning_gym.utils.extract_answer(text) or text.strip()
        return {"rewards": {player: self._data.score_answer(answer, self._entry)}, "done": True}

    def close(self) -> None:
        """There is nothing to free."""
