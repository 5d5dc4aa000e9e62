"""The interface of a tracker's library, and the messages between a run and the tracker's process.

An adapter is a class in the entry-point group `prorl_zmq.trackers`. It runs in a process of its own (see
`tracker_process`), so it may block, raise, print and start threads. It gets clean names, finite values, and bounded
texts.

On the socket each packet is one message, packed by msgpack. The trainer sends `RunSettings`, then `Values` and
`Samples`; closing the socket ends the run. The process sends `Opened` and `Trouble`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec

from .conversation import Conversation  # noqa: TC001 - msgspec reads the annotations at run time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GROUP = "prorl_zmq.trackers"
"""Of entry points."""
ADAPTER = "prorl_zmq.trackers.adapter:Adapter"
TRACKERS = "trackers"
"""The folder of the trackers' files, below a run's."""
TABLE = "conversations"
"""The name of the table of sample conversations."""


class RunSettings(msgspec.Struct, frozen=True):
    project: str
    run: str
    """The run's name; an existing run of this name is continued."""
    folder: str
    """The folder for files of the tracker."""
    config: dict[str, str | int | float | bool | None] = {}
    """The run's settings, as plain values."""


class Values(msgspec.Struct, frozen=True, tag=True):
    step: int
    values: dict[str, float]


class Samples(msgspec.Struct, frozen=True, tag=True):
    step: int
    rows: tuple[Conversation, ...]


class Opened(msgspec.Struct, frozen=True, tag=True):
    where: str


class Trouble(msgspec.Struct, frozen=True, tag=True):
    message: str


Entry = Values | Samples
Answer = Opened | Trouble
PACKET_BYTES = 2**18
"""Room for one."""


class Adapter(ABC):
    """One run in one library. The module of the class must import without the library."""

    library: ClassVar[str]
    """The module that must be importable."""
    package: ClassVar[str]
    """The package that pip installs it from."""
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
