"""The version of a server's weights, its source, and whether it is still valid. No I/O.

A server may be restarted at any time, with the weights of its start. A server that reported a number for its weights
and now reports a word was restarted; the weights of a server that reports nothing are unknown after an outage. Then all
generations fail until `update_weights` or `set_weight_version` succeeds. Not detected: a restart between two health
checks of a server that reports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import EngineFailed
from .answers import LOADING, UNTOLD, with_version

if TYPE_CHECKING:
    from ..engine import Generation

REPAIR = "update_weights or set_weight_version"


@dataclass(frozen=True, slots=True)
class Asked:
    """The known weights when a generation began."""

    number: int
    """The generation's number among all."""
    weight_version: int
    numbered: bool
    """Whether the server had reported these weights by a number."""


class KnownWeights:
    def __init__(self, url: str, weight_version: int, *, numbered: bool) -> None:
        self._url = url
        self.weight_version = max(weight_version, 0)
        self.fault = ""
        """Why the server's weights are unknown; empty: they are known."""
        self._numbered = numbered
        self._changed = False
        """Whether the weights differ from those that the server was started with."""
        self._down = False
        self._asked = 0
        self._told_by = 0
        """The generation whose answer reported the version; answers to earlier ones are older."""
        if weight_version == LOADING:
            self.half_taken()

    def asked(self) -> Asked:
        """Record that a generation begins."""
        self._asked += 1
        return Asked(self._asked, self.weight_version, self._numbered)

    def read(self, asked: Asked, generation: Generation) -> Generation:
        """Return an answer with the known version where the server reported none, and update the known version.

        Raises:
            EngineFailed: it is unknown which weights generated it.
        """
        versions = [span.weight_version for span in generation.spans]
        newer = asked.number > self._told_by
        if LOADING in versions:
            if newer:
                self.half_taken()
            raise EngineFailed(f"{self._url} generated while it took new weights", unreachable=True)
        if asked.numbered and UNTOLD in versions:
            message = f"{self._url} was started again: it has the weights that it started with; {REPAIR}"
            if newer:
                self.fault = message
            raise EngineFailed(message, unreachable=True)
        if newer and versions and versions[-1] >= 0:
            self._told_by, self._numbered, self.weight_version = asked.number, True, versions[-1]
        return replace(generation, spans=with_version(generation.spans, asked.weight_version))

    def changed(self, weight_version: int, *, numbered: bool) -> None:
        """Record new weights, and whether the server will report their number (`numbered`)."""
        self.weight_version, self._numbered = weight_version, numbered
        self._changed, self._down = True, False
        self._told_by = self._asked
        self.fault = ""

    def half_taken(self) -> None:
        """Record that the server's weights may be a mixture of old and new ones."""
        self.fault = f"{self._url} was left, or failed, in the middle of taking the weights; {REPAIR}"

    def down(self) -> None:
        self._down = True

    def up(self) -> None:
        """Record that the server is healthy."""
        if self._down and self._changed and not self._numbered and not self.fault:
            self.fault = (
                f"{self._url} was away, may have been started again, and does not say which weights it has; {REPAIR}"
            )
        self._down = False
