"""The list of allowed keys, checked at each handshake and again for each message. Owns no socket.

On the service's node it is the key folder's `allowed/`, reread when it changed; elsewhere the backend broker sends it
(`KeyList`). A revoked key loses its open connections within `REREAD_S`. If the list cannot be read, the last one stays
in force.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from zmq.utils import z85

from ..errors import ConfigError
from ..wire.messages.backends import AllowedKey
from ..wire.messages.base import KeyRole
from ..wire.sockets import is_loopback_host
from .keys import PublicKey
from .rights import ANYBODY, CONNECTING_ROLES, Listener, Sender

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .keyring import Keyring

REREAD_S = 1.0

log = logging.getLogger("prorl.security")


class Verdict(NamedTuple):
    """The decision on a connection."""

    user_id: str | None
    """The key that it proved, empty without one; None: it is refused."""
    reason: str = ""
    """Why it is refused, for our log only."""


class AllowList:
    """The allowed keys."""

    def __init__(self, keyring: Keyring | None, *, insecure: bool = False) -> None:
        self._keyring = keyring
        self._insecure = insecure
        self.is_told = keyring is not None and keyring.own.role != KeyRole.SERVICE
        """It has the list from `learn`, not from the folder."""
        self._known: dict[str, PublicKey] = {}
        self._names: dict[str, str] = {}
        """All keys allowed at any time, including revoked ones."""
        self._folder_state: object = None
        self._read_at = -REREAD_S
        self.list_state = ""
        """Names what the list holds; empty: there has been none yet."""
        self._learn([])
        self.reread()

    def judge(self, listener: str, address: str, mechanism: bytes, credentials: Sequence[bytes]) -> Verdict:
        """Decide on a connection."""
        if self._keyring is None:
            if mechanism != b"NULL":
                return Verdict(None, "it has a key, and this process has none")
            if self._insecure or is_loopback_host(address):
                return Verdict("")
            return Verdict(None, "it has no key and is on another machine")
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return Verdict(None, "it has no key")
        self.reread()
        public_key = z85.encode(credentials[0]).decode()
        key = self._known.get(public_key)
        if key is None and listener == Listener.BLOCKS:
            return Verdict(public_key)  # a node does not know trainers; what it gives has a secret name
        if key is None:
            return Verdict(None, f"the key {self._names.get(public_key, public_key)} is not allowed")
        if key.role not in CONNECTING_ROLES[Listener(listener)]:
            return Verdict(None, f"the key {key.name} is of role {key.role}")
        return Verdict(public_key)

    def sender(self, user_id: str) -> Sender:
        """Say who sent a message, from what the verdict on its connection named."""
        if not user_id:
            return ANYBODY
        if time.monotonic() >= self._read_at + REREAD_S:
            self.reread()
        key = self._known.get(user_id)
        if key is None:
            return Sender(None, self._names.get(user_id, user_id), user_id, revoked=True)
        return Sender(key.role, key.name, user_id)

    def reread(self) -> None:
        """Read the folder's list if it has changed."""
        if self.is_told or self._keyring is None:
            return
        self._read_at = time.monotonic()
        try:
            state = self._keyring.folder.allowed_state()
            if state != self._folder_state:
                keys = self._keyring.folder.allowed(lambda error: log.error("%s", error.message))
                self._learn([key for key in keys if key.role != KeyRole.SERVICE])
                self._folder_state = state
                listed = sorted(f"{key.public_key} {key.role} {key.name}" for key in self._known.values())
                self.list_state = hashlib.sha256("\n".join(listed).encode()).hexdigest()
        except ConfigError as error:
            log.error("the list of keys stays as it was: %s", error.message)  # noqa: TRY400 - it says it all

    def learn(self, keys: Iterable[AllowedKey], state: str) -> None:
        """Replace the list by the one that the backend broker sent as `state`."""
        self._learn([PublicKey(key.name, key.role, key.public_key) for key in keys if key.role != KeyRole.SERVICE])
        self.list_state = state

    def listed(self) -> tuple[AllowedKey, ...]:
        """Return the list, for engine hosts."""
        return tuple(
            AllowedKey(key.name, key.role, key.public_key)
            for key in self._known.values()
            if key.role != KeyRole.SERVICE
        )

    def _learn(self, keys: Sequence[PublicKey]) -> None:
        if self._keyring is None:
            return
        own, service = self._keyring.own.public, PublicKey("service", KeyRole.SERVICE, self._keyring.service_key)
        # The service last: no list can give its key another role. A node's engine hosts know its own key by themselves.
        self._known = {key.public_key: key for key in (own, *keys, service)}
        self._names.update({key.public_key: key.name for key in self._known.values()})
