"""The rollout broker's way to one stage process: a PUSH socket, and what libzmq says of its connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from ..errors import MalformedMessage, ProrlError
from ..security.handshake import Handshake
from ..security.keyring import Keyring, connect_to_peer
from ..sockets import CONTROL_FRAME_BYTES, NOBLOCK, open_socket, send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..messages import StageReport
    from ..sockets import Frame


class StageLine:
    """A line to where a stage process said that it listens.

    Args:
        context: the broker's.
        report: of the process.
        keyring: the broker's; None: plaintext.
        now: the time.

    Raises:
        MalformedMessage: the process cannot be reached where it says.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], report: StageReport, keyring: Keyring | None, now: float
    ) -> None:
        self.since = now
        try:
            self._socket = open_socket(context, zmq.PUSH, CONTROL_FRAME_BYTES)
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

    def has_broken(self) -> bool:
        """Tell whether a connection has ended since the last call. A process that lives is connected again soon."""
        return zmq.Event.DISCONNECTED in self._handshake.drain()

    def close(self, linger_ms: int = 0) -> None:
        """Close it; what was sent has `linger_ms` to leave."""
        self._handshake.close()
        self._socket.close(linger_ms)
