"""Anything with the `reset` and `step` of gymnasium over text: GEM, TextWorld, and classes of one's own.

The instance's `args` are those of the class, or of a function such as `gem.make`, whose first one is `id`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..adapter import Opening, Step

PLAYER = "main"
FIVE = 5
"""The values of `step`: with `terminated` and `truncated`; older ones have `done` alone."""


class Gymnasium:
    """Plays one environment that `make` returns."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def open(self, args: dict[str, Any], seed: int | None) -> Opening:
        first = [args.pop("id")] if "id" in args else []
        self._environment = self._make(*first, **args)
        begun = self._environment.reset(seed=seed)
        return {"observations": {PLAYER: _text(begun[0] if isinstance(begun, tuple) else begun)}}

    def step(self, player: str, text: str) -> Step:
        seen, reward, done, *rest = self._environment.step(text)
        truncated = bool(rest.pop(0)) if len(rest) == FIVE - 3 else False
        info = rest[0] if rest else {}
        step: Step = {
            "rewards": {player: reward},
            "done": bool(done) or truncated,
            "truncated": truncated,
            "info": info,
        }
        if not step["done"]:
            step["observations"] = {player: _text(seen)}
        return step

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if callable(close):
            close()


def _text(seen: Any) -> str:
    return seen if isinstance(seen, str) else json.dumps(seen, default=str, ensure_ascii=False)
