"""`PublisherRelay`: serves a trainer's folder of versions to engine hosts that do not see it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import InvalidWeights, ProrlError
from ...wire.messages.backends import KeyList, ListKeys
from ...wire.messages.base import new_id
from ...wire.messages.relay import WeightRelay, WeightSource
from ..checkpoint import DELTA
from ..weights.version_folder import published_versions, version_path
from .chunk_server import ChunkServer
from .offered_folder import OfferedFolder, offered_version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from ...security.keyring import Keyring

NAME = "trainer"

log = logging.getLogger("prorl.trainer")


class PublisherRelay:
    """Serves the versions in a folder, from a thread of its own, until it is closed.

    Args:
        root: the folder of versions.
        endpoint: where to bind, as engine hosts reach it: `tcp://ADDRESS:*`.
        keyring: the trainer's keys; None: it has none, so that the endpoint is a loopback address or `ipc://`.
        ask: sends a request to the backend broker and returns the reply.

    Raises:
        InvalidEndpoint, EndpointInUse: the endpoint cannot be bound.
    """

    def __init__(self, root: Path, endpoint: str, keyring: Keyring | None, ask: Callable[[Any], Any]) -> None:
        self._root = root
        self._has_keys = keyring is not None
        self._ask = ask
        self._server = ChunkServer(endpoint, keyring)
        self._offered: dict[Path, OfferedFolder] = {}
        try:
            self._serve()
        except BaseException:
            self._server.close()
            raise

    @property
    def sent_bytes(self) -> int:
        """What was sent to hosts."""
        return self._server.sent_bytes

    def relay(self, path: Path) -> WeightRelay:
        """Serve what is in the folder now; return where hosts fetch the version in `path`.

        Raises:
            InvalidWeights: its index is not there.
        """
        self._learn_keys()
        for one in (path, path / DELTA):
            self._offered.pop(one, None)  # the number may have been used before
        self._serve()
        newest = self._offered[path] if path in self._offered else offered_version(path)
        return WeightRelay(newest.digest, (WeightSource(NAME, self._server.endpoint, self._server.curve_key),))

    def _serve(self) -> None:
        """Serve all versions in the folder, and no others."""
        complete, _ = published_versions(self._root)
        paths = [version_path(self._root, number) for number in complete]
        paths += [one / DELTA for one in paths if (one / DELTA).is_dir()]
        self._offered = {one: folder for one, folder in self._offered.items() if one in paths}
        for one in paths:
            if one not in self._offered:
                with suppress(InvalidWeights):
                    self._offered[one] = offered_version(one)
        self._server.withdraw({folder.digest for folder in self._offered.values()})
        self._server.offer(*self._offered.values())

    def _learn_keys(self) -> None:
        """Get the list of keys that may connect; without an answer the last one stays in force."""
        allowed = self._server.allow_list
        if not self._has_keys or not allowed.is_told:
            return
        try:
            reply: KeyList = self._ask(ListKeys(new_id(), allowed.list_state))
        except ProrlError as error:
            log.warning("the list of allowed keys stays as it was: %s", error.message)
            return
        if reply.keys is not None:
            allowed.learn(reply.keys, reply.state)

    def close(self) -> None:
        """Stop serving. May be called again."""
        self._server.close()
