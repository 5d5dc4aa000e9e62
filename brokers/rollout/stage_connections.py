"""`StageConnections`: the connections to all stage processes. It owns the sockets and decides about no job.

    PUSH, one per member, connected to the PULL that it announced → phases to start and stop, events noted

A member is a stage process by itself, or a node that represents all of its stage processes. A member that does not read
its messages is not waited for: its lease expires.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...errors import Busy, ConfigError, MalformedMessage, NotAllowed, ProrlError, VersionMismatch
from ...wire import codec
from ...wire.messages.base import PROTOCOL_VERSION
from ...wire.messages.stages import EventsNoted, StageRefused, StageReport, StageWelcome
from .node_places import NodePlaces
from .stage_connection import StageConnection

if TYPE_CHECKING:
    from collections.abc import Iterable

    import zmq

    from ...security.keyring import Keyring
    from ...security.rights import Sender
    from ...wire.messages.stages import StageCommand
    from ...wire.sockets import Frame
    from .stage_pool import StagePool

ANSWERABLE = ("protocol", "stage_id", "member", "role", "node", "endpoint", "curve_key")
"""Fields of a report that are needed to answer it."""
NOTED_WITHIN_S = 0.02
"""Longest delay of a confirmation, in seconds, so that commands are sent first."""
NOTED_AT_ONCE = 64
"""Number of confirmations that are sent without delay."""
FULL_EVERY_S = 30.0
"""Seconds between two log lines about missing descriptors."""

log = logging.getLogger("prorl.rollout_broker")


class StageConnections:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring | None, welcome: StageWelcome) -> None:
        self._context = context
        self._keyring = keyring
        self._welcome = welcome
        self._connections: dict[str, StageConnection] = {}
        """By member."""
        self._asked: dict[str, StageConnection] = {}
        """Silent members at the last `refusing`."""
        self._members: dict[str, str] = {}
        """The member that reports for each stage process."""
        self._places = NodePlaces()
        self._version = version("prorl-zmq")
        self._unconnected = 0
        """Reports without a descriptor since the last log line."""
        self._full_said_at = -math.inf
        self._noted: defaultdict[str, list[int]] = defaultdict(list)
        """Numbers of confirmed events, by member."""
        self._notes = 0
        self.say_noted_at: float | None = None
        """When to send confirmations, after the journal has the changes; None if there are none or they are due."""

    def __contains__(self, stage_id: str) -> bool:
        return stage_id in self._members

    def member_of(self, stage_id: str) -> str:
        """Return the member that reports for a stage process, or the stage process itself."""
        return self._members.get(stage_id, stage_id)

    def reported(self, report: StageReport, key: str, now: float, living: StagePool) -> bool:
        """Connect to and welcome a new member; return whether it may get jobs.

        A node with the name of another live node is refused. Raises `MalformedMessage` if the member cannot be reached.
        """
        member = report.from_member
        is_new = member not in self._connections
        if is_new:
            try:
                self._connections[member] = StageConnection(self._context, report, key, self._keyring, now)
            except Busy as error:
                self._say_full(report, error, now)
                return False
        if self.member_of(report.stage_id) != member:
            self.left(report.stage_id)  # another member reported for it
        self._members[report.stage_id] = member
        self._connections[member].stage_ids.add(report.stage_id)
        if is_new and report.protocol != PROTOCOL_VERSION:
            self._refuse_version(report)
            return False
        if is_new and report.facts is not None and report.facts.version != self._version:
            versions = (report.node, report.facts.version, self._version)
            log.warning("node %s has prorl-zmq %s, and this broker %s: install one version everywhere", *versions)
        try:
            if not self._places.joins(report, living.heard_at, now):
                return False
        except ConfigError as error:
            log.warning("refused %s: %s", member, error.message)
            self._refuse(member, error)
            return False
        if is_new or report.asks_answer or not report.welcomed:
            self.welcome(member)
        return report.welcomed

    def refuse_version(self, content: dict[str, Any], key: str, now: float) -> None:
        """Answer a report of another protocol, from which only `ANSWERABLE` fields are read."""
        known = {name: content[name] for name in ANSWERABLE if name in content}
        with suppress(MalformedMessage, Busy):
            report: StageReport = codec.convert({**known, "slots": 0, "tasks": ()}, StageReport)
            if report.from_member not in self._connections:
                self._connections[report.from_member] = StageConnection(self._context, report, key, self._keyring, now)
                self._refuse_version(report)

    def welcome(self, member: str) -> None:
        """Have a member report everything."""
        self._send(member, self._welcome)

    def welcome_all(self, welcome: StageWelcome) -> None:
        """Send all members a changed welcome."""
        if welcome != self._welcome:
            self._welcome = welcome
            for member in self._connections:
                self.welcome(member)

    def turn_away(self, member: str, sender: Sender) -> None:
        """Tell a member that its key was revoked, and disconnect; its lease then expires."""
        connection = self._connections.get(member)
        if connection is not None and connection.key == sender.user_id:
            log.warning("the key of stage process %s was revoked", member)
            self._refuse(member, NotAllowed(f"the key of stage process {member} was revoked", key=sender.name))

    def send(self, stage_id: str, command: StageCommand, *frames: Frame) -> None:
        self._send(self._members.get(stage_id, stage_id), command, *frames)

    def note(self, stage_id: str, number: int, now: float) -> None:
        """Queue the confirmation of an event, to be sent at `say_noted_at`."""
        if not self._notes:
            self.say_noted_at = now + NOTED_WITHIN_S
        self._noted[self.member_of(stage_id)].append(number)
        self._notes += 1
        if self._notes == NOTED_AT_ONCE:
            self.say_noted_at = now

    def say_noted(self) -> None:
        """Send all members the confirmations of their events."""
        for member, numbers in self._noted.items():
            self._send(member, EventsNoted(tuple(sorted(numbers))))
        self._noted.clear()
        self._notes, self.say_noted_at = 0, None

    def refusing(self, members: Iterable[str]) -> list[str]:
        """Return those of the silent members that refuse another connection: they have died."""
        asked = {member: self._connections[member] for member in members if member in self._connections}
        for member, connection in self._asked.items():
            if member not in asked:
                connection.end_probe()
        self._asked = asked
        found = [member for member, connection in asked.items() if connection.is_refused()]
        for member in found:
            log.warning("stage process %s is quiet, and refuses another connection", member)
        return found

    def drop_silent(self, living: StagePool, before: float) -> None:
        """Close connections from before `before` to members without a lease."""
        for member, connection in tuple(self._connections.items()):
            if living.lease(member) is None and connection.since <= before:
                log.warning("stage process %s is silent", member)
                self._disconnect(member)

    def left(self, stage_id: str) -> None:
        """Remove a stage process; close the connection if it was its member's last."""
        member = self._members.pop(stage_id, stage_id)
        connection = self._connections.get(member)
        if connection is not None:
            connection.stage_ids.discard(stage_id)
            if not connection.stage_ids:
                self._disconnect(member)

    def close(self) -> None:
        for member in tuple(self._connections):
            self._disconnect(member)

    def _send(self, member: str, command: StageCommand, *frames: Frame) -> None:
        connection = self._connections.get(member)
        if connection is not None and not connection.send([codec.encode(command, is_plain=True), *frames]):
            log.warning("stage process %s does not take messages; its lease will expire", member)

    def _disconnect(self, member: str, linger_ms: int = 0) -> None:
        connection = self._connections.pop(member, None)
        if connection is not None:
            connection.close(linger_ms)
            self._places.left(member)
            for stage_id in connection.stage_ids:
                del self._members[stage_id]

    def _say_full(self, report: StageReport, error: Busy, now: float) -> None:
        self._unconnected += 1
        if now >= self._full_said_at + FULL_EVERY_S:
            about = (self._unconnected, report.stage_id, error.message)
            log.error("%d reports went without an answer, the last one of %s: %s", *about)
            self._full_said_at, self._unconnected = now, 0

    def _refuse_version(self, report: StageReport) -> None:
        log.warning("refused %s of node %s, which speaks protocol %d", report.stage_id, report.node, report.protocol)
        self._refuse(report.from_member, _mismatch(report))

    def _refuse(self, member: str, error: ProrlError) -> None:
        self._send(member, StageRefused(error.info()))
        self._disconnect(member, linger_ms=1000)


def _mismatch(report: StageReport) -> VersionMismatch:
    return VersionMismatch(
        f"the stage process speaks protocol {report.protocol}, the broker {PROTOCOL_VERSION}; install the same version "
        "of prorl-zmq on both",
        ours=PROTOCOL_VERSION,
        theirs=report.protocol,
    )
