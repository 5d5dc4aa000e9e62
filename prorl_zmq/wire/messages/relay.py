"""The relay of weights: where engine hosts fetch chunks from, and how they ask for them.

A host asks with `[b"", ChunkAsk]`, and the source answers with `[b"", state, the same ChunkAsk, data]`:

| state | meaning |
|---|---|
| `data` | the bytes follow |
| `wait` | they are not here yet; sent every `WAIT_S` while an ask is open, without an ask and data |
| `gone` | they are not here, and will not come |
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .base import AnnouncedKey, Digest, Identifier, Part, PathText, WeightVersion

DATA, WAIT, GONE = b"data", b"wait", b"gone"
"""The states of an answer."""
WAIT_S = 0.5
INDEX_FILE = -1
"""Stands for the index of the folder."""
COPY_FILE = -2
"""Stands for the index of the host's own copy. `folder` is then the digest of the copy's content."""
SOURCES_LIMIT = 64

Endpoint = Annotated[str, Meta(min_length=1, max_length=256)]


class WeightSource(Part, frozen=True):
    """A process that serves chunks of weights."""

    name: Identifier
    """The id of a host's backend, or a name for the trainer."""
    endpoint: Endpoint
    curve_key: AnnouncedKey = ""


class WeightRelay(Part, frozen=True):
    """Where hosts fetch a version that they do not see under its path."""

    index: Digest
    """The SHA-256 of the version's index, in hexadecimal: all else is checked against that index."""
    sources: Annotated[tuple[WeightSource, ...], Meta(min_length=1, max_length=SOURCES_LIMIT)]
    """From the trainer to the backend broker: the trainer. From there to a host: whom to ask, the first one first."""


class ChunkAsk(Part, frozen=True, array_like=True):
    """Ask for a chunk of a file in a folder of weights. No path can be named."""

    folder: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """The SHA-256 of the folder's index."""
    file: Annotated[int, Meta(ge=COPY_FILE, le=2**31 - 1)]
    """The number of the file, of those in the index in the order of their names; or `INDEX_FILE` or `COPY_FILE`."""
    chunk: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    patient: bool = True
    """Leave the ask open for a while if the folder is not known."""


class CopyState(Part, frozen=True):
    """The copy of weights that an engine host keeps, and how it got the last version."""

    place: Annotated[str, Meta(max_length=64)]
    """Identifies the machine and folder: hosts with the same one share the copy."""
    path: PathText
    source: WeightSource | None = None
    """Where other hosts get chunks; None: nowhere."""
    version: WeightVersion | None = None
    """None: no whole version."""
    weights: Digest = ""
    """Identifies its content; empty: not known."""
    size_bytes: Annotated[int, Meta(ge=0)] = 0
    """On disk."""
    fetched_bytes: Annotated[int, Meta(ge=0)] = 0
    """From other processes, for the last version that was fetched from any."""
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    fed_by: Annotated[dict[Identifier, Annotated[int, Meta(ge=0)]], Meta(max_length=SOURCES_LIMIT)] = {}
    """How many of these bytes came from whom."""
