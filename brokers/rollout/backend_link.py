"""`BackendLink`: the rollout broker's connection to the backend broker.

    DEALER → backend broker's ROUTER    `Release` for RUNs that fail, are lost or are stopped; `ListModels`
    DEALER ← backend broker's ROUTER    the replies, of which only `ModelList` is read

Nothing is resent: the leases of unreleased assignments expire, and a client asks again for an unknown model.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import zmq

from ...errors import MalformedMessage
from ...security.keyring import connect_to_service
from ...wire import codec
from ...wire.messages.backends import AnyBackendReply, ListModels, ModelList, Release
from ...wire.messages.base import new_id
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, open_socket, receive, send

if TYPE_CHECKING:
    from ...security.keyring import Keyring
    from ..loop import Loop
    from .stage_pool import SlotClaim
    from .task_catalog import TaskCatalog

BATCH = 256
"""Most replies read before other sockets are served."""

log = logging.getLogger("prorl.rollout_broker")


class BackendLink:
    def __init__(self, loop: Loop, endpoint: str, keyring: Keyring | None, catalog: TaskCatalog) -> None:
        self._loop = loop
        self._catalog = catalog
        self._socket = open_socket(loop.context, zmq.DEALER, CONTROL_FRAME_BYTES)
        connect_to_service(self._socket, endpoint, keyring)

    def register(self) -> None:
        """Have the loop read the replies."""
        self._loop.register(self._socket, self._drain)

    def release(self, claim: SlotClaim) -> None:
        """Release what an attempt holds of all models."""
        self._send(Release(new_id(), *claim, model=""))

    def ask_models(self) -> None:
        """Request the list of models for the catalog."""
        self._catalog.wants_models = False
        self._send(ListModels(new_id()))

    def _send(self, request: Release | ListModels) -> None:
        try:
            send(self._socket, [b"", codec.encode(request)], NOBLOCK)
        except zmq.Again:
            log.warning("the backend broker does not take requests; its leases will expire")

    def _drain(self) -> None:
        for _ in range(BATCH):
            try:
                _, header = receive(self._socket, copied=2)
                reply: AnyBackendReply = codec.decode(header, AnyBackendReply)  # type: ignore[arg-type]
            except zmq.Again:
                return
            except (MalformedMessage, ValueError) as error:
                log.warning("dropped a reply of the backend broker: %s", error)
                continue
            if isinstance(reply, ModelList):
                self._catalog.list_models(reply.models, reply.lacking)
