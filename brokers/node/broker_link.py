"""`BrokerLink`: a node's connection to one rollout broker.

    PUSH  → the broker's stage events: reports of the pools, phases ended, with the node's own numbers
    PULL  (bound, announced) ← the broker: phases to start and stop, events noted, its demand for slots

A pool is all stage processes of one role here, and one stage process for this broker. Each new connection begins with
full reports. When the broker moves, the node connects to its new place, and the stage processes notice nothing. Events
and commands have no replies that a `Requester` could wait for: reports repeat what was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zmq
from msgspec.structs import replace

from ...errors import LeaseLost
from ...security.handshake import Handshake
from ...security.rights import Listener
from ...wire import codec
from ...wire.change_reports import ChangeReports
from ...wire.messages.base import PROTOCOL_VERSION
from ...wire.messages.jobs import Outcome, Phase
from ...wire.messages.stages import BlockSent, PhaseFailed, SlotDemand, StageLeaving, StageReport, TurnsShown
from ...wire.sockets import CONTROL_FRAME_BYTES, JOB_FRAME_BYTES, NOBLOCK, NODE_PING_S, open_socket, send
from .event_numbers import EventNumbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...security.keyring import Keyring
    from ...security.zap_authenticator import ZapAuthenticator
    from ...wire.messages.jobs import BlockHandle
    from ...wire.messages.nodes import NodeFacts
    from ...wire.messages.stages import Keep, PhaseDone, ShowTurns, StageEvent
    from ...wire.sockets import Frame

DEMAND_EVERY = 5
"""Heartbeats from one question for a broker's demand to the next."""


class BrokerLink:
    """Raises `InvalidEndpoint` where it cannot bind or connect."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        broker: str,
        node: str,
        node_id: str,
        place: str,
        bind: str,
        authenticator: ZapAuthenticator,
        keyring: Keyring | None,
    ) -> None:
        self.broker = broker
        self.welcomed = False
        self.demand = SlotDemand({})
        self.demand_at = 0.0
        """When the broker last sent it, or joined."""
        self.keep: Keep = "broker"
        """Where it wants trajectories' blocks."""
        self.events = EventNumbers()
        self._context = context
        self._keyring = keyring
        self._node = node
        self._node_id = node_id
        self._reports = ChangeReports(node_id)
        self._backends: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._beats = 0
        self._slots: dict[str, int] = {}
        """Of each pool, as they were reported last."""
        self.inbox = open_socket(context, zmq.PULL, JOB_FRAME_BYTES, NODE_PING_S)
        self.endpoint = authenticator.bind(self.inbox, bind, Listener.STAGE_INBOX)
        self.curve_key = authenticator.curve_key(self.endpoint)
        self._place = ""
        self._open(place)

    def connect(self, place: str) -> None:
        """Connect to where the broker is now, if that is another place."""
        if place != self._place:
            self._handshake.close()
            self._open(place)

    @property
    def place(self) -> str:
        return self._place

    @property
    def problem(self) -> str:
        """Why there is no connection; empty: nothing is known of it."""
        return self._handshake.problem

    def answered(self, now: float) -> None:
        """The broker has welcomed the node, and wants to know everything."""
        self.welcomed, self.demand_at = True, now
        self._reports.answered()

    def want_full(self) -> None:
        self._reports.want_full()

    def pool(self, role: Phase) -> str:
        """Return the name of a pool, as this broker knows it."""
        return f"{role}-{self._node_id}"

    def note_backend(self, job_id: str, backend: str) -> None:
        self._backends[job_id] = backend

    def note_address(self, job_id: str, address: str) -> bool:
        """Note where a rollout is reached; return whether that is news."""
        is_new = self._addresses.get(job_id) != address
        self._addresses[job_id] = address
        return is_new

    def report(self, running: dict[Phase, dict[str, int]], pools: Sequence[StageReport], facts: NodeFacts) -> None:
        """Send a heartbeat: `pools` has what is to be said of each pool beside its phases."""
        if self._handshake.drain():
            self._reports.connected()
        if self._handshake.refused:
            self._handshake.renew()
        held = {self.pool(role): phases for role, phases in running.items()}
        jobs = {job_id for phases in held.values() for job_id in phases}
        self._backends = {job_id: backend for job_id, backend in self._backends.items() if job_id in jobs}
        self._addresses = {job_id: address for job_id, address in self._addresses.items() if job_id in jobs}
        slots = {pool.stage_id: pool.slots for pool in pools}
        if slots != self._slots:
            self._reports.want_full()
        if self._reports.is_full(held, self._backends, facts, self._addresses) or not self.welcomed:
            for gone in self._slots.keys() - slots.keys():
                self.send(StageLeaving(gone))
            self._slots = slots
            for pool in pools:
                answer = {"welcomed": self.welcomed, "asks_answer": self._reports.is_unanswered}
                self.send(replace(pool, number=self._reports.number, facts=facts, **answer))
            return
        alive = self._reports.changes(held, self._backends, facts, self._addresses)
        self._beats += 1
        self.send(replace(alive, asks_demand=self._beats % DEMAND_EVERY == 1))

    def full(self, role: Phase, phases: dict[str, int], kept: Sequence[str] | None = None, **more: Any) -> StageReport:
        """Return the full report of a pool."""
        return StageReport(
            protocol=PROTOCOL_VERSION,
            stage_id=self.pool(role),
            member=self._node_id,
            role=role,
            endpoint=self.endpoint,
            curve_key=self.curve_key,
            running=phases,
            ended=self.events.ended(role),
            backends={job_id: self._backends[job_id] for job_id in phases if job_id in self._backends},
            addresses={job_id: self._addresses[job_id] for job_id in phases if job_id in self._addresses},
            kept=tuple(kept) if kept is not None else None,
            **more,
        )

    def number(self, event: PhaseDone | PhaseFailed) -> int:
        """Return the node's number of an event of a stage process."""
        return self.events.number(event.stage_id, event.number, event.phase, event.job_id, event.attempt)

    def end(self, event: PhaseDone | PhaseFailed, block: Sequence[Frame], kept: BlockHandle | None = None) -> None:
        """Send on the end of a phase of a stage process, with its block unless that is `kept` here."""
        sent = replace(event, stage_id=self.pool(event.phase), number=self.number(event), origin="", kept=kept)
        self.send(sent, block if kept is None else ())

    def show(self, event: TurnsShown, block: Sequence[Frame] = ()) -> None:
        """Send on the turns that a stage process shows."""
        self.send(replace(event, stage_id=self.pool(Phase.RUN), origin=""), block)

    def show_none(self, question: ShowTurns) -> None:
        """Answer that the phase has not begun here, or has ended."""
        self.show(
            TurnsShown(
                stage_id=self.pool(Phase.RUN),
                job_id=question.job_id,
                attempt=question.attempt,
                known_tokens=question.known_tokens,
            )
        )

    def give_back(self, job_id: str, attempt: int, phase: Phase, why: str, *, lost: bool = False) -> None:
        """Have the broker give a phase to others: `lost` if it was begun here, so that its attempt is spent.

        Nobody sends this again; if it is lost, the next full report lacks the phase.
        """
        stage_id = self.pool(phase)
        error = LeaseLost(f"{phase} was given back by node {self._node}: {why}", stage_id=stage_id)
        self.send(
            PhaseFailed(
                stage_id=stage_id,
                job_id=job_id,
                attempt=attempt,
                phase=phase,
                outcome=Outcome.INFRASTRUCTURE_ERROR,
                error=error.info(),
                retry=True,
                given_back=not lost,
            )
        )

    def leave(self) -> None:
        """Say that all pools are gone."""
        for pool in self._slots:
            self.send(StageLeaving(pool))

    def send(self, event: StageEvent, block: Sequence[Frame] = ()) -> None:
        """Send an event; one that the broker does not take is sent again by who made it."""
        try:
            send(self._handshake.socket, [codec.encode(event), *block], NOBLOCK)
        except zmq.Again:
            self._reports.want_full()

    def send_block(self, block_id: str, block: bytes | None) -> None:
        """Send a block that was kept here, or that it is lost."""
        sent = BlockSent(stage_id=self.pool(Phase.RUN), block_id=block_id, lost=block is None)
        self.send(sent, () if block is None else (block,))

    def close(self) -> None:
        self._handshake.close(linger_ms=1000)
        self.inbox.close()

    def _open(self, place: str) -> None:
        self._place = place
        self._handshake = Handshake(
            self._context,
            zmq.PUSH,
            place,
            self._keyring,
            limit_bytes=CONTROL_FRAME_BYTES,
            ping_s=NODE_PING_S,
            watch=True,
        )
        self._reports.connected()
