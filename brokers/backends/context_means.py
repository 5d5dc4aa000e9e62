"""`ContextMeans`: the mean context of ended rollouts, by model. Pure."""

from __future__ import annotations

COUNTED = 500
"""Most rollouts that a mean counts as. Beyond it, each new one has this share: the mean follows a curriculum."""


class ContextMeans:
    def __init__(self) -> None:
        self._means: dict[str, tuple[int, float]] = {}

    def note(self, model: str, tokens: int) -> None:
        """Record the context of a rollout that has ended."""
        count, mean = self._means.get(model, (0, 0.0))
        count = min(count + 1, COUNTED)
        self._means[model] = (count, mean + (tokens - mean) / count)

    def mean(self, model: str) -> tuple[int, float]:
        """Return the number of rollouts that count, and the mean of their contexts in tokens."""
        return self._means.get(model, (0, 0.0))
