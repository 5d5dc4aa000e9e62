"""`Handshake`: a socket that connects to another process, and libzmq's events about its connection, in words.

libzmq gives a connection up if the other side refuses our key, or if only one side has keys; `renew` begins again.
After other failures it retries by itself.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import zmq

from ..errors import NotAllowed
from ..wire.sockets import HIGH_WATER_MARK, MAX_FRAME_BYTES, PING_S, connect, open_socket
from .keyring import connect_to_peer, connect_to_service

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
    """A socket that connects, now or when somebody binds the endpoint; owns it and the socket of its events.

    A `curve_key` of None stands for a broker, another one for a peer, whose key it is (empty: it has none). Over `ipc://`
    there are events only with `watch`; `retries` adds one for each try to connect that failed. At most `messages` wait
    to be received.

    Raises:
        InvalidEndpoint: the endpoint is malformed; or only one of us and a peer has keys.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        endpoint: str,
        keyring: Keyring | None,
        *,
        curve_key: str | None = None,
        limit_bytes: int = MAX_FRAME_BYTES,
        messages: int = HIGH_WATER_MARK,
        ping_s: float = PING_S,
        watch: bool = False,
        retries: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._keyring = keyring
        self.problem = ""
        """Why there is no connection; empty: unknown, or there is one."""
        self.refused = False
        """Only `renew` tries again."""
        self.connections = 0
        """How many were established, as far as the events say."""
        self._succeeded = False
        """The last one was established."""
        self.socket = open_socket(context, kind, limit_bytes, ping_s)
        self.socket.rcvhwm = messages
        is_watched = watch or endpoint.startswith("tcp://")
        wanted = EVENTS | zmq.EVENT_CONNECT_RETRIED if retries else EVENTS
        self.events = self.socket.get_monitor_socket(wanted) if is_watched else None
        """Where the events arrive; None: nowhere."""
        try:
            if curve_key is None:
                connect_to_service(self.socket, endpoint, keyring)
            else:
                connect_to_peer(self.socket, endpoint, curve_key, keyring)
        except BaseException:
            self.close()
            raise

    def note(self, frames: list[bytes]) -> zmq.Event:
        """Take one event, as the monitor received it (`zmq_socket_monitor(3)`), and give its kind."""
        number, value = struct.unpack("=HI", frames[0])
        event = zmq.Event(number)
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.problem, self._succeeded = "", True
            self.connections += 1
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

    def drain(self) -> int:
        """Take all events that have arrived; return how many connections were established."""
        before = self.connections
        while self.events is not None and self.events.poll(0):
            self.note(self.events.recv_multipart())
        return self.connections - before

    def error(self) -> NotAllowed:
        """Return the problem as an error."""
        return NotAllowed(self.problem, key=self._keyring.own.name if self._keyring is not None else "")

    def renew(self, endpoint: str = "") -> None:
        """Reconnect after a refusal, or to the other side's new endpoint."""
        self.refused = False
        self.socket.disconnect(self._endpoint)
        self._endpoint = endpoint or self._endpoint
        connect(self.socket, self._endpoint)

    def stop(self) -> None:
        """End the watch; call it before the socket of the events is closed. May be called again.

        An event for a closed socket would block libzmq's own thread for ever, and us behind it.
        """
        if self.events is not None and not self.socket.closed:
            self.socket.disable_monitor()

    def close(self, linger_ms: int = 0) -> None:
        """Close both sockets; what was sent has `linger_ms` to leave. May be called again."""
        self.stop()
        if self.events is not None:
            self.events.close()
        self.socket.close(linger_ms)

    def _refusal(self) -> str:
        if self._keyring is None:
            return (
                f"{self._endpoint} refused this connection, which has no key: name a key folder (keys=…, --keys or "
                "$PRORL_KEYS)"
            )
        own = self._keyring.own
        return (
            f"{self._endpoint} refused the key {own.name} ({own.role}): it is not allowed there, or not by keys of "
            f"this role. Allow it where the service's keys are: `prorl keys allow {own.name}.pub --role {own.role}`"
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
