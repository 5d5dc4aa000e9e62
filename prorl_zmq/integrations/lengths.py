"""Rollouts that are longer than a framework trains on."""

from __future__ import annotations

from typing import Literal

from ..errors import ConfigError

TooLong = Literal["drop", "truncate"]


def response_room(tokens: int, most: int | None, too_long: TooLong) -> int:
    """Return how many of a response's tokens are trained on: all, at most so many, or 0 if it is dropped."""
    if most is None or tokens <= most:
        return tokens
    return max(most, 0) if too_long == "truncate" else 0


def check_too_long(too_long: str) -> None:
    if too_long not in ("drop", "truncate"):
        raise ConfigError(f'too_long is "drop" or "truncate", not {too_long!r}', key="too_long")
