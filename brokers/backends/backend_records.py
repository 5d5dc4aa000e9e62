"""The records of the backend broker's journal: backends and the wanted weights."""

from __future__ import annotations

from typing import Literal

from ...wire.messages.backends import Backend  # noqa: TC001 - msgspec reads the annotations at run time
from ...wire.messages.base import POLICY, Digest, ModelName, Part, PathText, Seconds, WeightVersion
from ...wire.messages.relay import WeightRelay  # noqa: TC001 - as above

Fate = Literal["listed", "lost", "dismissed"]
"""`lost`: its host fell silent. `dismissed`: it was removed on request, which its host may not have learned."""


class BackendRecord(Part, frozen=True, kw_only=True):
    fate: Fate
    backend: Backend
    """The registration, with the weights that the backend serves now or served last."""
    draining: bool = False
    """Whether the backend was asked to accept no more jobs."""
    needed_version: WeightVersion = 0
    """The backend accepts no jobs while its weights are older than this version."""
    heartbeats: bool = False
    """Whether its host promised heartbeats."""
    reported: WeightVersion | None = None
    """Weight version of the host's last message; None: the next message counts even if the version is the same."""
    has_room: bool = False
    """Whether its host states its room."""
    of_before: bool = False
    """Whether its host belonged to an earlier service and has not been heard since."""


class WeightsRecord(Part, frozen=True):
    """The weights of one model."""

    wanted: WeightVersion = 0
    """The model's backends with older weights get no jobs."""
    begun: WeightVersion | None = None
    """Weight version of the update in progress; None if there is none."""
    limit_s: Seconds = 1.0
    """Time limit of that update in seconds."""
    path: PathText = ""
    """Where engines can load the wanted weights; empty if they were not loaded from a path."""
    model: ModelName = POLICY
    base: ModelName | Literal[""] = ""
    """The model that an adapter adapts; empty: they are its backends' own weights."""
    digest: Digest = ""
    """Of the wanted version's content, or of the adapter's files."""
    relay: WeightRelay | None = None
    """Where hosts fetch the wanted version that do not see its path."""
