"""What is remembered beyond the life of the backend broker's process: each backend, and which weights are wanted."""

from __future__ import annotations

from typing import Literal

from ...wire.messages.backends import Backend  # noqa: TC001 - msgspec reads the annotations at run time
from ...wire.messages.base import Part, PathText, Seconds, WeightVersion

Fate = Literal["listed", "lost", "dismissed"]
"""`lost`: its host fell silent. `dismissed`: it was removed on request, and its host may not know."""


class BackendRecord(Part, frozen=True, kw_only=True):
    fate: Fate
    backend: Backend
    """As it was registered, with the weights that it serves now, or last served."""
    draining: bool = False
    """It was asked to take no more jobs."""
    needed_version: WeightVersion = 0
    """While its weights are older than these it takes no jobs."""
    heartbeats: bool = False
    """It promised them."""
    reported: WeightVersion | None = None
    """The weight version of its host's last message; None: its next one counts, even the same."""
    of_before: bool = False
    """It was of a service that has ended, and was not heard of since."""


class WeightsRecord(Part, frozen=True):
    wanted: WeightVersion = 0
    """Those that serve older ones get no jobs."""
    begun: WeightVersion | None = None
    """The weights that are on their way; None: none are."""
    limit_s: Seconds = 1.0
    """How long they may be."""
    path: PathText = ""
    """Where engines can load the wanted ones; empty: they came by other means."""
