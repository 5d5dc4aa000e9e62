"""`StageConnection`: the rollout broker's PUSH socket to one stage process, and a probe whether it still listens.

The system refuses connections to a process that has died, but not to one that was stopped or is behind a cut link; the
lease detects those, so nodes are pinged seldom. A libzmq monitor would need two more descriptors per process. Commands
have no replies: reports and the lease show what was lost.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import zmq

from ...errors import Busy, MalformedMessage, ProrlError
from ...security.keyring import Keyring, connect_to_peer
from ...wire.connection_guard import no_room
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, NODE_PING_S, PING_S, check_numeric, open_socket, send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.stages import StageReport
    from ...wire.sockets import Frame

REFUSALS = (errno.ECONNREFUSED, errno.ENOENT)


class StageConnection:
    """A connection to the endpoint that a stage process reported.

    Raises:
        Busy: too few file descriptors are left.
        MalformedMessage: the endpoint is unreachable or not numeric; a look-up would block all of libzmq's sockets.
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
        """The stage processes behind this connection."""
        self.since = now
        self._endpoint = report.endpoint
        self._probe: socket.socket | None = None
        """A pending connection that shows whether connections are refused."""
        check_numeric(report.endpoint)
        if problem := no_room():
            raise Busy(f"{problem}, or have `prorl node` speak for all stage processes of a node")
        try:
            ping_s = NODE_PING_S if report.member else PING_S
            self._socket = open_socket(context, zmq.PUSH, CONTROL_FRAME_BYTES, ping_s)
        except zmq.ZMQError as error:
            raise MalformedMessage(f"no socket for {report.endpoint}: {error.strerror}") from error
        try:
            connect_to_peer(self._socket, report.endpoint, report.curve_key, keyring)
        except (ProrlError, zmq.ZMQError) as error:
            self.close()
            raise MalformedMessage(f"{report.endpoint} cannot be reached: {error}") from error

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send a message; return False if the queue is full."""
        try:
            send(self._socket, frames, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def is_refused(self) -> bool:
        """Return whether the system refuses another connection, because no process listens.

        Does not block: the next call returns what is not known yet.
        """
        try:
            if self._probe is None:
                self._probe, error = _begin(self._endpoint)
                if error not in REFUSALS:
                    return False
            else:
                error = self._probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except OSError:  # no descriptor is left
            return False
        self.end_probe()
        return error in REFUSALS

    def end_probe(self) -> None:
        """Close the probe."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; sent messages have `linger_ms` milliseconds to leave."""
        self.end_probe()
        self._socket.close(linger_ms)


def _begin(endpoint: str) -> tuple[socket.socket, int]:
    """Begin a connection; return the socket and the error known at once, or 0."""
    transport, _, address = endpoint.partition("://")
    place: str | tuple[str, int]
    if transport == "ipc":
        probe, place = socket.socket(socket.AF_UNIX), address
    else:
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        probe, place = socket.socket(family), (host.strip("[]"), int(port))
    probe.setblocking(False)
    error = probe.connect_ex(place)
    return probe, error if error != errno.EINPROGRESS else probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
