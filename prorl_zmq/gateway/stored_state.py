"""`StoredState`: which clients have called `/start`, and which engines they named, across restarts of a gateway.

A file in the run folder, written atomically. A file of another run of `prorl serve` is ignored.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path  # noqa: TC003 - a field

import msgspec

from ..config import SERVICE_VARIABLE

log = logging.getLogger("prorl.gateway")


class ClientState(msgspec.Struct):
    is_running: bool = False
    addresses: list[str] = []


class _File(msgspec.Struct):
    service: str
    tokenizer: str
    clients: dict[str, ClientState]


class StoredState:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._service = os.environ.get(SERVICE_VARIABLE, "")
        self.tokenizer = ""
        """The engines' tokenizer."""
        self.clients: dict[str, ClientState] = {}
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, and is begun again: %s", path, error)
            return
        if found.service == self._service:
            self.tokenizer, self.clients = found.tokenizer, found.clients

    def of(self, client: str) -> ClientState:
        return self.clients.setdefault(client, ClientState())

    @property
    def addresses(self) -> set[str]:
        """The engines of all clients."""
        return {address for client in self.clients.values() for address in client.addresses}

    def write(self) -> None:
        part = self._path.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(_File(self._service, self.tokenizer, self.clients)))
            part.replace(self._path)
        except OSError as error:
            log.error("%s cannot be written: %s", self._path, error.strerror)  # noqa: TRY400 - it says it all
