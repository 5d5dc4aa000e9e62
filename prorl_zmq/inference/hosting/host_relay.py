"""Opens an engine host's part of the relay of weights."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ProrlError

if TYPE_CHECKING:
    from ...security.allow_list import AllowList
    from ...security.keyring import Keyring
    from ..engine import EngineDescription
    from ..relay.weights_relay import WeightsRelay
    from ..weights.local_copy import LocalCopy

log = logging.getLogger("prorl.engine")


def local_copy(folder: Path, engine: EngineDescription) -> LocalCopy:
    """Return the copy of an engine's weights in a folder.

    Raises:
        ImportError: a library for it is missing.
    """
    from ..weights.local_copy import LocalCopy

    model = Path(engine.model)
    return LocalCopy(folder, model if model.is_absolute() and model.is_dir() else None)


def open_relay(
    folder: Path,
    name: str,
    engine: EngineDescription,
    endpoint: str,
    keyring: Keyring | None,
    allow_list: AllowList,
    *,
    insecure: bool,
) -> WeightsRelay | None:
    """Return the relay of a host with a copy of weights; None: a library for it is missing.

    A host whose chunk server cannot be bound fetches, and serves no other host.

    Args:
        folder: of the copy.
        name: of the host's backend.
        engine: its engine.
        endpoint: of the host: other hosts reach its chunk server at the same address.
        keyring: the keys of this process; None: it has none.
        allow_list: the keys that may connect.
        insecure: plaintext TCP beyond loopback is allowed.
    """
    try:
        from ..relay.chunk_server import ChunkServer
        from ..relay.offered_copy import offered_copy
        from ..relay.weights_relay import WeightsRelay

        copy = local_copy(folder, engine)
    except ImportError as error:
        log.debug("no relay of weights: %s", error)
        return None
    server: ChunkServer | None = None
    address = f"{endpoint}.w" if endpoint.startswith("ipc://") else f"{endpoint.rpartition(':')[0]}:*"
    find_copy = partial(offered_copy, copy)
    try:
        server = ChunkServer(address, keyring, insecure=insecure, allow_list=allow_list, find_copy=find_copy)
    except ProrlError as error:
        log.warning("no other host gets weights from this one: %s", error.message)
    return WeightsRelay(copy, server, name, keyring)
