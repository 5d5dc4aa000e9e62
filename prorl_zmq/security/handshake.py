"""Why a connection of ours does not come about: libzmq's events about one connecting socket, in words.

Some failures are final: the service has refused our key, or only one side has keys. libzmq then gives the connection
up, where it tries again after any other; `renew` begins it anew. Over `ipc://` no handshake fails for want of a key.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import zmq

from ..errors import NotAllowed
from ..wire.sockets import connect

if TYPE_CHECKING:
    from .keyring import Keyring

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
)
"""What tells of a connection's beginning, failure and end."""


class Handshake:
    """What is known of a socket's connection."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, keyring: Keyring | None) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._keyring = keyring
        self.problem = ""
        """What is the matter; empty: nothing that is known of."""
        self.refused = False
        """It will not be tried again, but by `renew`."""
        self._succeeded = False
        """The connection that there is, or was last, came about."""
        self._monitor: zmq.Socket[bytes] | None = None

    def watch(self) -> zmq.Socket[bytes]:
        """Begin to watch, and give the socket where the events arrive. Call it before the socket is connected."""
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        return self._monitor

    def note(self, frames: list[bytes]) -> zmq.Event:
        """Take one event, as the monitor received it (`zmq_socket_monitor(3)`), and give its kind."""
        number, value = struct.unpack("=HI", frames[0])
        event = zmq.Event(number)
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.problem, self._succeeded = "", True
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self.problem, self.refused = self._refusal(), True
        elif event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            self.problem, self.refused = self._mismatch(value), True
        elif event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and not self.refused:
            self.problem = self._hang_up()
        elif event == zmq.Event.DISCONNECTED:
            if not (self._succeeded or self.refused or self.problem):
                self.problem = self._hang_up()  # so libzmq tells of two sockets of kinds that do not go together
            self._succeeded = False
        return event

    def drain(self) -> list[zmq.Event]:
        """Take all events that have arrived, and give their kinds."""
        kinds: list[zmq.Event] = []
        while self._monitor is not None and self._monitor.poll(0):
            kinds.append(self.note(self._monitor.recv_multipart()))
        return kinds

    def error(self) -> NotAllowed:
        """Return the problem as an error."""
        return NotAllowed(self.problem, key=self._keyring.own.name if self._keyring is not None else "")

    def renew(self, endpoint: str = "") -> None:
        """Begin a connection that was refused anew; or one to where the other side is now."""
        self.refused = False
        self._socket.disconnect(self._endpoint)
        self._endpoint = endpoint or self._endpoint
        connect(self._socket, self._endpoint)

    def stop(self) -> None:
        """End the watch; call it before the socket of the events is closed. May be called again.

        An event for a socket that is not there any more blocks libzmq's own thread for ever, and us behind it.
        """
        if self._monitor is not None and not self._socket.closed:
            self._socket.disable_monitor()

    def close(self) -> None:
        """End the watch, and close the socket of the events. May be called again."""
        self.stop()
        if self._monitor is not None:
            self._monitor.close()

    def _refusal(self) -> str:
        if self._keyring is None:
            return (
                f"{self._endpoint} refused this connection, which has no key: name a key folder (keys=…, --keys or "
                "$PRORL_KEYS)"
            )
        own = self._keyring.own
        return (
            f"{self._endpoint} refused the key {own.name} ({own.role}): it is not let in there, or not by keys of this "
            f"role. `prorl keys allow {own.name}.pub --role {own.role}` where the service's keys are lets it in"
        )

    def _mismatch(self, code: int) -> str:
        if code != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return f"what answers at {self._endpoint} does not speak this protocol (ZMTP error {code:#x})"
        if self._keyring is None:
            return f"{self._endpoint} wants a key: name a key folder (keys=…, --keys or $PRORL_KEYS)"
        return f"{self._endpoint} takes no keys: start it with --keys, or do without (unset $PRORL_KEYS)"

    def _hang_up(self) -> str:
        if self._keyring is None:
            return f"{self._endpoint} ends the handshake: is it the right port of a service, and does it want keys?"
        folder, role = self._keyring.folder.path, self._keyring.own.role
        return (
            f"{self._endpoint} ends the handshake: is the service's public key in {folder} that of the service there, "
            f"and is it the right port? Some are not for a key of role {role}"
        )
