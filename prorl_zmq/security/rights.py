"""The rights of each role: which listeners (bound sockets) a key may connect to, and which requests it may send.

The two tables below hold all of them. The service's own key may do everything: the brokers use it. There are no rights
per session or per stage process: keys of one role trust each other, as programs of one account do.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ..errors import NotAllowed
from ..wire.messages.backends import (
    AddBackend,
    Assign,
    BackendAlive,
    ClearBackends,
    DrainBackend,
    GenerationFailed,
    HoldWeights,
    ListBackends,
    ListKeys,
    OwnerAlive,
    Release,
    RemoveBackend,
    ReportStarts,
)
from ..wire.messages.base import KeyRole
from ..wire.messages.batches import CloseBatch, Feed, NextGroup, OpenBatch, SessionAlive
from ..wire.messages.engines import Abort, EngineHealth, Generate, WeightUpdate
from ..wire.messages.front_door import (
    Cancel,
    Collect,
    EndSession,
    Hello,
    ListSessions,
    RelayBlocks,
    Status,
    Submit,
    Trace,
)
from ..wire.messages.nodes import ListNodes
from ..wire.messages.watching import ListSteps, Peek, PeekTurns, ViewBatch, Watch


class Listener(StrEnum):
    """A bound socket; also its ZAP domain."""

    FRONT_DOOR = "front_door"
    STAGE_EVENTS = "stage_events"
    BACKEND_BROKER = "backend_broker"
    STAGE_INBOX = "stage_inbox"
    BLOCKS = "blocks"
    ENGINE = "engine"


CONNECTING_ROLES: dict[Listener, frozenset[KeyRole]] = {
    Listener.FRONT_DOOR: frozenset({KeyRole.TRAINER, KeyRole.OPERATOR, KeyRole.SERVICE}),
    Listener.STAGE_EVENTS: frozenset({KeyRole.STAGE, KeyRole.SERVICE}),
    Listener.BACKEND_BROKER: frozenset(KeyRole),
    Listener.STAGE_INBOX: frozenset({KeyRole.SERVICE}),
    Listener.BLOCKS: frozenset(KeyRole),
    Listener.ENGINE: frozenset({KeyRole.STAGE, KeyRole.SERVICE}),
}
"""Which roles may connect at all; others fail the handshake."""

_Kinds = frozenset[type[msgspec.Struct]]
_EVERYBODY: _Kinds = frozenset({Hello, Status, ListNodes, ListBackends})
_BATCHES: _Kinds = frozenset({OpenBatch, Feed, NextGroup, CloseBatch, SessionAlive})
_WATCHING: _Kinds = frozenset({Watch, Peek, PeekTurns, ViewBatch, ListSteps})
_WEIGHTS: _Kinds = frozenset({WeightUpdate, HoldWeights})
REQUESTS: dict[KeyRole, _Kinds] = {
    KeyRole.TRAINER: _EVERYBODY | _WEIGHTS | _BATCHES | {Submit, Collect, RelayBlocks, Cancel, Trace},
    KeyRole.OPERATOR: _EVERYBODY
    | _WATCHING
    | _WEIGHTS
    | {Cancel, Trace, ListSessions, EndSession, AddBackend, DrainBackend, RemoveBackend, ClearBackends},
    KeyRole.STAGE: _EVERYBODY
    | {
        Assign,
        GenerationFailed,
        Release,
        OwnerAlive,
        AddBackend,
        BackendAlive,
        DrainBackend,
        RemoveBackend,
        ReportStarts,
        ListKeys,
        EngineHealth,
        Generate,
        Abort,
    },
}
"""Which requests each role may make, at the listeners that it may connect to."""


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

    def check(self, request: msgspec.Struct) -> None:
        """Raise unless this sender may ask for that.

        Raises:
            NotAllowed: its key was revoked, or its role has no right to it.
        """
        if self.revoked:
            raise self.revocation()
        if self.role in (None, KeyRole.SERVICE):
            return
        if type(request) not in REQUESTS[self.role]:
            able = [role for role, kinds in REQUESTS.items() if type(request) in kinds]
            # A node's own processes may do some of it too, but no command or client takes their keys.
            named = [role for role in able if role != KeyRole.STAGE] or able or [KeyRole.SERVICE]
            raise NotAllowed(
                f"the {self.role} key {self.name} may not ask for `{request.__struct_config__.tag}`; "
                f"use a key of role {' or '.join(named)}",
                key=self.name,
            )


ANYBODY = Sender()
