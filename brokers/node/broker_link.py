"""`BrokerLink`: a node's connection to one rollout broker.

    PUSH  → the broker's stage events: pool reports, ended phases, numbered by the node
    PULL  (bound, announced) ← the broker: phases to start and stop, noted events, its slot demand

To the broker, all stage processes of one role are one pool, which looks like one stage process. Each new connection
begins with full reports, and reports repeat what was lost. When the broker moves, the node reconnects and the stage
processes are unaffected.
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
"""Heartbeats from one request for a broker's demand to the next."""


class BrokerLink:
    """A connection that is open when it is created; raises `InvalidEndpoint` if it cannot bind or connect."""

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
        """When the broker last sent its demand, or joined, in seconds of the loop's clock."""
        self.keep: Keep = "broker"
        """Where the broker wants trajectory blocks stored."""
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
        """Slots per pool in the last full report."""
        self.inbox = open_socket(context, zmq.PULL, JOB_FRAME_BYTES, NODE_PING_S)
        self.endpoint = authenticator.bind(self.inbox, bind, Listener.STAGE_INBOX)
        self.curve_key = authenticator.curve_key(self.endpoint)
        self._place = ""
        self._open(place)

    def connect(self, place: str) -> None:
        """Connect to the broker's current place, if that changed."""
        if place != self._place:
            self._handshake.close()
            self._open(place)

    @property
    def place(self) -> str:
        return self._place

    @property
    def problem(self) -> str:
        """Why the connection failed; empty if no problem is known."""
        return self._handshake.problem

    def answered(self, now: float) -> None:
        """Record the broker's welcome; the next report is full."""
        self.welcomed, self.demand_at = True, now
        self._reports.answered()

    def want_full(self) -> None:
        self._reports.want_full()

    def pool(self, role: Phase) -> str:
        """Return a pool's name, as this broker uses it."""
        return f"{role}-{self._node_id}"

    def note_backend(self, job_id: str, backend: str) -> None:
        self._backends[job_id] = backend

    def note_address(self, job_id: str, address: str) -> bool:
        """Record the address of a job's rollout; return whether it is new."""
        is_new = self._addresses.get(job_id) != address
        self._addresses[job_id] = address
        return is_new

    def report(self, running: dict[Phase, dict[str, int]], pools: Sequence[StageReport], facts: NodeFacts) -> None:
        """Send a heartbeat, or full reports if the broker needs them: `pools`, with answer fields filled in here."""
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
        """Return a pool's full report."""
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
        """Return the node's number for a stage process's event."""
        return self.events.number(event.stage_id, event.number, event.phase, event.job_id, event.attempt)

    def end(self, event: PhaseDone | PhaseFailed, block: Sequence[Frame], kept: BlockHandle | None = None) -> None:
        """Forward the end of a phase, with its block unless the block is `kept` on this node."""
        sent = replace(event, stage_id=self.pool(event.phase), number=self.number(event), origin="", kept=kept)
        self.send(sent, block if kept is None else ())

    def show(self, event: TurnsShown, block: Sequence[Frame] = ()) -> None:
        """Forward the turns that a stage process shows."""
        self.send(replace(event, stage_id=self.pool(Phase.RUN), origin=""), block)

    def show_none(self, question: ShowTurns) -> None:
        """Answer that no phase of this attempt runs on this node."""
        self.show(
            TurnsShown(
                stage_id=self.pool(Phase.RUN),
                job_id=question.job_id,
                attempt=question.attempt,
                known_tokens=question.known_tokens,
            )
        )

    def give_back(self, job_id: str, attempt: int, phase: Phase, why: str, *, lost: bool = False) -> None:
        """Return a phase to the broker once; `lost` spends its attempt, since the phase had begun here.

        If this message is lost, the next full report omits the phase.
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
        """Report that all pools have left."""
        for pool in self._slots:
            self.send(StageLeaving(pool))

    def send(self, event: StageEvent, block: Sequence[Frame] = ()) -> None:
        """Send an event, or drop it if the queue is full: its originator resends it, and the next report is full."""
        try:
            send(self._handshake.socket, [codec.encode(event), *block], NOBLOCK)
        except zmq.Again:
            self._reports.want_full()

    def send_block(self, block_id: str, block: bytes | memoryview | None) -> None:
        """Send a block that this node stored, or report that the block is lost."""
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
