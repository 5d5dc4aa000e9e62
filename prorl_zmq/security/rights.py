"""Rights: which roles of keys may connect to each listener (bound socket), and who sent a message.

Each request's class says which roles may send it (`Request.roles`). The service's own key may do everything. There are
no rights by session or by stage process.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from ..errors import NotAllowed
from ..wire.messages.base import KeyRole

if TYPE_CHECKING:
    from ..wire.messages.base import Request


class Listener(StrEnum):
    """A bound socket; also its ZAP domain."""

    FRONT_DOOR = "front_door"
    STAGE_EVENTS = "stage_events"
    BACKEND_BROKER = "backend_broker"
    STAGE_INBOX = "stage_inbox"
    BLOCKS = "blocks"
    ENGINE = "engine"
    WEIGHTS = "weights"


CONNECTING_ROLES: dict[Listener, frozenset[KeyRole]] = {
    Listener.FRONT_DOOR: frozenset({KeyRole.TRAINER, KeyRole.OPERATOR, KeyRole.SERVICE}),
    Listener.STAGE_EVENTS: frozenset({KeyRole.STAGE, KeyRole.SERVICE}),
    Listener.BACKEND_BROKER: frozenset(KeyRole),
    Listener.STAGE_INBOX: frozenset({KeyRole.SERVICE}),
    Listener.BLOCKS: frozenset(KeyRole),
    Listener.ENGINE: frozenset({KeyRole.STAGE, KeyRole.SERVICE}),
    Listener.WEIGHTS: frozenset({KeyRole.STAGE, KeyRole.SERVICE}),
}
"""Which roles may connect at all; others fail the handshake."""


class Sender(msgspec.Struct, frozen=True):
    """Who sent a message, as the handshake of its connection proved."""

    role: KeyRole | None = None
    """None: it came by ipc or, without keys, from loopback, where the system's own permissions decide."""
    name: str = ""
    user_id: str = ""
    """The public key that its connection has proved."""
    revoked: bool = False

    def revocation(self) -> NotAllowed:
        """Return the error for a request whose key was revoked."""
        return NotAllowed(f"the key {self.name} was revoked", key=self.name)

    def check(self, request: Request) -> None:
        """Raise unless this sender may ask for that.

        Raises:
            NotAllowed: its key was revoked, or its role has no right to it.
        """
        if self.revoked:
            raise self.revocation()
        if self.role in (None, KeyRole.SERVICE):
            return
        if self.role not in request.roles:
            able = [role for role in KeyRole if role in request.roles]
            # A node's own processes may do some of it too, but no command or client takes their keys.
            named = [role for role in able if role != KeyRole.STAGE] or able or [KeyRole.SERVICE]
            raise NotAllowed(
                f"the {self.role} key {self.name} may not ask for `{request.__struct_config__.tag}`; "
                f"use a key of role {' or '.join(named)}",
                key=self.name,
            )


ANYBODY = Sender()
