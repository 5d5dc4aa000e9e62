"""A process's own CURVE key, and how it connects to the service and to peers that the service named.

Every TCP connection is made here; `ipc://` needs no keys. The service's public key is in the key folder; the key of a
stage process or engine host comes from the service (`curve_key` of `StageReport` and `Backend`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidEndpoint
from ..wire.messages.base import KeyRole
from ..wire.sockets import connect, is_loopback
from .keys import KeyFolder, KeyPair, named_folder

if TYPE_CHECKING:
    from pathlib import Path

    import zmq

BROKER = (KeyRole.SERVICE,)
WORKER = (KeyRole.STAGE, KeyRole.SERVICE)
CLIENT = (KeyRole.TRAINER, KeyRole.OPERATOR, KeyRole.SERVICE)
"""Which keys each kind of process may use, the best first."""


@dataclass(frozen=True, slots=True)
class Keyring:
    """A key of ours, and that of the service."""

    own: KeyPair
    service_key: str
    """The service's public key."""
    folder: KeyFolder

    @classmethod
    def load(cls, keys: Path | str | None, roles: tuple[KeyRole, ...]) -> Keyring | None:
        """Read the keys in a folder, which `$PRORL_KEYS` names if `keys` does not; None: no keys are to be used.

        Raises:
            ConfigError: the folder is not private, or lacks a key.
        """
        named = named_folder(keys)
        if named is None:
            return None
        folder = KeyFolder(named)
        own = folder.own(*roles)
        service = own if own.role == KeyRole.SERVICE else folder.service()
        return cls(own, service.public_key, folder)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket that is about to be bound prove this key, and ask each client for one."""
        socket.curve_server = True
        socket.curve_publickey = self.own.public_key.encode()
        socket.curve_secretkey = self.own.secret_key.encode()

    def present(self, socket: zmq.Socket[bytes], server_key: str) -> None:
        """Have a socket that is about to connect prove this key, to a server that proves `server_key`."""
        socket.curve_serverkey = server_key.encode()
        socket.curve_publickey = self.own.public_key.encode()
        socket.curve_secretkey = self.own.secret_key.encode()


def connect_to_service(socket: zmq.Socket[bytes], endpoint: str, keyring: Keyring | None) -> None:
    """Connect to a broker, which may come later.

    Raises:
        InvalidEndpoint: it is malformed.
    """
    if keyring is not None and endpoint.startswith("tcp://"):
        keyring.present(socket, keyring.service_key)
    connect(socket, endpoint)


def connect_to_peer(socket: zmq.Socket[bytes], endpoint: str, curve_key: str, keyring: Keyring | None) -> None:
    """Connect to a stage process or engine host, which may come later.

    Raises:
        InvalidEndpoint: it is malformed; only one side has keys; or it is beyond loopback and announced no key.
    """
    if endpoint.startswith("tcp://"):
        if curve_key and keyring is None:
            raise InvalidEndpoint(
                f"{endpoint} wants keys, and this process has none: name a key folder with --keys or $PRORL_KEYS",
                endpoint=endpoint,
            )
        if keyring is not None and curve_key:
            keyring.present(socket, curve_key)
        elif keyring is not None and not is_loopback(endpoint):
            raise InvalidEndpoint(
                f"{endpoint} is on another machine and announced no key; start what serves it with --keys",
                endpoint=endpoint,
            )
    connect(socket, endpoint)
