"""The rollout broker's way to one stage process: a PUSH socket, and what libzmq says of its connection.

Where a process has died, its connection ends and another one is refused. One that was stopped loses its connection too
(libzmq's pings end it), but the system still takes another one for it; where a link is cut, nothing is refused. Both
are noticed by the lease, so a node, of which there may be thousands, is pinged seldom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from ...errors import Busy, MalformedMessage, ProrlError
from ...security.handshake import Handshake
from ...security.keyring import Keyring, connect_to_peer
from ...wire.connection_guard import no_room
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, NODE_PING_S, PING_S, check_numeric, open_socket, send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.stages import StageReport
    from ...wire.sockets import Frame


class StageConnection:
    """A connection to where a stage process said that it listens.

    Raises:
        Busy: this process may open hardly any more files.
        MalformedMessage: the process cannot be reached where it says; a host's name is never looked up, since that
            would hold up all of libzmq's sockets.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        report: StageReport,
        key: str,
        keyring: Keyring | None,
        now: float,
    ) -> None:
        self.key = key
        self.stage_ids: set[str] = set()
        """Whom it reaches."""
        self.since = now
        self._is_cut = False
        check_numeric(report.endpoint)
        if problem := no_room():
            raise Busy(f"{problem}, or have `prorl node` speak for all stage processes of a node")
        try:
            ping_s = NODE_PING_S if report.member else PING_S
            self._socket = open_socket(context, zmq.PUSH, CONTROL_FRAME_BYTES, ping_s)
        except zmq.ZMQError as error:
            raise MalformedMessage(f"no socket for {report.endpoint}: {error.strerror}") from error
        self._handshake = Handshake(self._socket, report.endpoint, keyring)
        try:
            self._handshake.watch()
            connect_to_peer(self._socket, report.endpoint, report.curve_key, keyring)
        except (ProrlError, zmq.ZMQError) as error:
            self.close()
            raise MalformedMessage(f"{report.endpoint} cannot be reached: {error}") from error

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send a message; false if the process takes none."""
        try:
            send(self._socket, frames, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def has_died(self) -> bool:
        """Tell whether, since the last call, the connection was found to have ended and another one to be refused."""
        died = False
        for event in self._handshake.drain():
            match event:
                case zmq.Event.DISCONNECTED:
                    self._is_cut = True
                case zmq.Event.CONNECTED:
                    self._is_cut = False
                case zmq.Event.CLOSED if self._is_cut:
                    died, self._is_cut = True, False
        return died

    def close(self, linger_ms: int = 0) -> None:
        """Close it; what was sent has `linger_ms` to leave."""
        self._handshake.close()
        self._socket.close(linger_ms)
