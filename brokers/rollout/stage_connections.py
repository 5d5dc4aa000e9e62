"""The connections to all stage processes: who is welcome, what they are sent, and who no longer answers.

    PUSH, one per stage process, connected to the PULL that it announced → phases to start and stop, events noted

A process that does not take its messages is not waited for: its lease expires. Owns the sockets; decides about no job.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from ...errors import NotAllowed, ProrlError, VersionMismatch
from ...wire import codec
from ...wire.messages.base import PROTOCOL_VERSION
from ...wire.messages.stages import EventsNoted, StageRefused, StageWelcome
from .stage_connection import StageConnection

if TYPE_CHECKING:
    import zmq

    from ...security.keyring import Keyring
    from ...security.rights import Sender
    from ...wire.messages.stages import StageCommand, StageReport
    from ...wire.sockets import Frame
    from .stage_pool import StagePool

log = logging.getLogger("prorl.rollout_broker")


class StageConnections:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring | None, welcome: StageWelcome) -> None:
        self._context = context
        self._keyring = keyring
        self._welcome = welcome
        self._connections: dict[str, StageConnection] = {}
        self._noted: defaultdict[str, set[int]] = defaultdict(set)
        """Events that each stage process may forget, by number."""

    def __contains__(self, stage_id: str) -> bool:
        return stage_id in self._connections

    def reported(self, report: StageReport, key: str, now: float) -> bool:
        """Connect to a process that reports for the first time, and welcome it; whether it may take jobs.

        Raises:
            MalformedMessage: it cannot be reached where it says.
        """
        if report.stage_id not in self._connections:
            self._connections[report.stage_id] = StageConnection(self._context, report, key, self._keyring, now)
            if report.protocol != PROTOCOL_VERSION:
                self._refuse(report.stage_id, _mismatch(report))
                return False
            self.send(report.stage_id, self._welcome)
        elif not report.welcomed:
            self.send(report.stage_id, self._welcome)
        return report.welcomed

    def turn_away(self, stage_id: str, sender: Sender) -> None:
        """Tell a process that its key was revoked; its lease then expires."""
        connection = self._connections.get(stage_id)
        if connection is not None and connection.key == sender.user_id:
            log.warning("the key of stage process %s was revoked", stage_id)
            self._refuse(stage_id, NotAllowed(f"the key of stage process {stage_id} was revoked", key=sender.name))

    def send(self, stage_id: str, command: StageCommand, *frames: Frame) -> None:
        connection = self._connections.get(stage_id)
        if connection is not None and not connection.send([codec.encode(command), *frames]):
            log.warning("stage process %s does not take messages; its lease will expire", stage_id)

    def note(self, stage_id: str, number: int) -> bool:
        """Remember that a process may forget an event; whether it is the first since `say_noted`."""
        first = not self._noted
        self._noted[stage_id].add(number)
        return first

    def say_noted(self) -> None:
        """Tell all processes which of their events are in the journal."""
        for stage_id, numbers in self._noted.items():
            self.send(stage_id, EventsNoted(tuple(sorted(numbers))))
        self._noted.clear()

    def broken(self) -> list[str]:
        """Return the processes whose connection ended and that refuse another one, since the last call."""
        found = [stage_id for stage_id, connection in self._connections.items() if connection.has_died()]
        for stage_id in found:
            log.warning("the connection to stage process %s ended, and another one is refused", stage_id)
        return found

    def drop_silent(self, living: StagePool, before: float) -> None:
        """Close the connections, older than `before`, to processes that are not among the living ones."""
        for stage_id, connection in tuple(self._connections.items()):
            if stage_id not in living and connection.since <= before:
                log.warning("stage process %s is silent", stage_id)
                self.disconnect(stage_id)

    def disconnect(self, stage_id: str, linger_ms: int = 0) -> None:
        connection = self._connections.pop(stage_id, None)
        if connection is not None:
            connection.close(linger_ms)

    def close(self) -> None:
        for stage_id in tuple(self._connections):
            self.disconnect(stage_id)

    def _refuse(self, stage_id: str, error: ProrlError) -> None:
        self.send(stage_id, StageRefused(error.info()))
        self.disconnect(stage_id, linger_ms=1000)


def _mismatch(report: StageReport) -> VersionMismatch:
    return VersionMismatch(
        f"the stage process speaks protocol {report.protocol}, the broker {PROTOCOL_VERSION}; install the same version "
        "of prorl-zmq on both",
        ours=PROTOCOL_VERSION,
        theirs=report.protocol,
    )
