"""What a tracker's library has to do: begin a run, take values and tables, and end it.

An adapter for one library is a class of the entry-point group `prorl_zmq.trackers`. It runs in a process of its own
(see `tracker_process`), so it may block, raise, print and start threads. Names of values that arrive here are made of
the characters that all trackers take, values are finite, and texts are clean and bounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .conversation import Conversation

GROUP = "prorl_zmq.trackers"
"""Of entry points."""
ADAPTER = "prorl_zmq.trackers.adapter:Adapter"
TRACKERS = "trackers"
"""The folder of what trackers keep here, below a run's."""
TABLE = "conversations"
"""The name of the table of sample conversations."""


class RunSettings(msgspec.Struct, frozen=True):
    project: str
    run: str
    """The run's name; a run of this name that is there already is continued."""
    folder: str
    """For what the tracker keeps here."""
    config: dict[str, str | int | float | bool | None] = {}
    """What the run is about."""


class Adapter(ABC):
    """One run in one library; the class is asked for its names where the library may be missing."""

    library: ClassVar[str]
    """The module that must be importable."""
    package: ClassVar[str]
    """What pip installs it from."""
    where: str
    """Where a person finds the run."""

    @abstractmethod
    def __init__(self, settings: RunSettings) -> None:
        """Begin the run, or continue it."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def samples(self, rows: Sequence[Conversation], step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
