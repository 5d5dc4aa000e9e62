"""`NodeBroker`: a rollout broker to the stage processes of one node, and one stage process per role to rollout brokers.

    PULL  stage events, in the run folder  ← the node's stage processes
    PUSH, one per stage process             → phases to start and stop
    `BrokerLink`, one per rollout broker    ⇄ the rollout brokers

A rollout broker has one connection, one lease and one heartbeat per node. The node alone divides its slots among
several rollout brokers (see `slot_shares`).

When the node broker dies, the stage processes continue, report their state to its successor, and resend the ends of
phases that no rollout broker has noted. The node broker stores only trajectory blocks on disk; an orderly shutdown
sends unfetched blocks to their rollout brokers. When a stage process dies, the node reports its phases as lost at once.
When a rollout broker dies, its jobs continue, and its slots go to the other brokers as they become free.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq

from ...errors import MalformedMessage, from_info
from ...metrics import catalog
from ...security.keyring import WORKER, Keyring
from ...security.rights import Listener
from ...security.zap_authenticator import ZapAuthenticator
from ...wire import codec
from ...wire.messages.jobs import Phase
from ...wire.messages.nodes import NodeFacts
from ...wire.messages.stages import (
    BlockSent,
    CloseSandbox,
    EventsNoted,
    ForgetBlocks,
    MemberAlive,
    PhaseDone,
    PhaseFailed,
    SendBlocks,
    ShowTurns,
    SlotDemand,
    StageCommand,
    StageEvent,
    StageLeaving,
    StageRefused,
    StageReport,
    StageWelcome,
    StartPhase,
    StopPhase,
    TurnsShown,
)
from ...wire.sockets import open_socket, receive
from ..loop import BATCH, Loop
from ..rollout.stage_connections import StageConnections
from .block_server import BlockServer
from .block_store import BlockStore
from .broker_link import BrokerLink
from .node_table import NodeTable
from .slot_shares import Demand, divide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ...wire.sockets import Frame
    from .node_table import HeldPhase

LOCAL_LEASE_S = 10.0
"""How long a silent stage process keeps its phases, in seconds."""
LOCAL_QUIET_S = 2.5
FIRST_REPORT_S = 0.5
LOOK_S = 2.0
"""How often the node looks up the rollout brokers' places, in seconds."""
DEMAND_LOST_S = 15.0
"""A rollout broker that has sent no demand for this many seconds keeps only its used slots."""
HAND_OVER_S = 12.0
"""How many seconds a node that shuts down may take to send unfetched blocks to its brokers."""
HANDED_AT_ONCE = 32
"""Most blocks that may be in flight to one broker during that time."""

log = logging.getLogger("prorl.node_broker")


class _Waiting(NamedTuple):
    """A phase that cannot start yet: no slot is free, or another broker's job with the same id is here."""

    link: BrokerLink
    command: StartPhase
    frames: Sequence[Frame]
    until: float
    """When the phase is returned to its broker."""


class _JobTask(msgspec.Struct):
    """The only field of a packed job that the node reads."""

    task: str


_task_of = msgspec.msgpack.Decoder(_JobTask).decode


class NodeBroker:
    """A node broker, bound when it is created and ready to `run`.

    Args:
        node: the node's name.
        place: the machine and the run folder.
        node_id: the id of this run of the node, the same for each broker process of it.
        stage_events: `ipc://` endpoint to which the node's stage processes connect.
        bind: endpoint at which rollout brokers reach the node, such as `tcp://10.0.0.7:*`.
        run_dir: the node's run folder, which contains the stored blocks.
        places: returns the stage-event endpoint of each rollout broker, by name.
        facts: returns facts about this machine; called for every heartbeat.
        keys: the key folder; None: `$PRORL_KEYS`, or no keys.
        insecure: whether TCP beyond loopback is allowed without keys.

    Raises:
        EndpointInUse, InvalidEndpoint: the node could not bind.
    """

    def __init__(
        self,
        *,
        node: str,
        place: str,
        node_id: str,
        stage_events: str,
        bind: str,
        run_dir: Path,
        places: Callable[[], Mapping[str, str]],
        facts: Callable[[], NodeFacts] = NodeFacts,
        keys: Any = None,
        insecure: bool = False,
    ) -> None:
        self._node = node
        self._run_dir = run_dir
        self._place = place
        self._places = places
        self._read_facts = facts
        self._loop = Loop()
        keyring = Keyring.load(keys, WORKER)
        self._authenticator = ZapAuthenticator(self._loop.context, keyring, insecure=insecure)
        self._table = NodeTable(LOCAL_LEASE_S, LOCAL_QUIET_S)
        self._stages: StageConnections | None = None
        """None until a rollout broker has named the backend broker."""
        self._announced: dict[Phase, StageReport] = {}
        """Reports of stage processes before then, by role: pools without slots."""
        self._waiting: list[_Waiting] = []
        self._heartbeat_s = FIRST_REPORT_S
        self._next_report = self._next_look = self._loop.clock.now()
        self._told: dict[str, str] = {}
        """The last connection problem logged for each rollout broker."""
        self._refused: StageRefused | None = None
        try:
            self._events = open_socket(self._loop.context, zmq.PULL)
            self._authenticator.bind(self._events, stage_events, Listener.STAGE_EVENTS)
            self._links = {
                name: BrokerLink(self._loop.context, name, node, node_id, place, bind, self._authenticator, keyring)
                for name, place in places().items()
            }
            self._blocks = BlockStore(run_dir / "blocks")
            self._block_server = BlockServer(
                self._loop, self._blocks, self._authenticator, bind, run_dir / "blocks.socket"
            )
        except BaseException:
            self._loop.close()
            raise

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; raise a rollout broker's refusal of this node, if any."""
        self._loop.report_metrics(self._run_dir, "node_broker", self._set_gauges)
        self._loop.register(self._events, self._drain_events)
        for link in self._links.values():
            self._loop.register(link.inbox, lambda link=link: self._drain_commands(link))  # type: ignore[misc]
        self._authenticator.register(self._loop.register)
        self._block_server.register()
        try:
            self._loop.run(self._housekeep, lambda: log.info("ready: node %s", self._node))
            self._hand_over()
            for link in self._links.values():
                link.leave()
        finally:
            if self._stages is not None:
                self._stages.close()
            for link in self._links.values():
                link.close()
            self._block_server.close()
            self._loop.close()
        if self._refused is not None:
            raise from_info(self._refused.error)

    def stop(self) -> None:
        self._loop.stop()

    # From rollout brokers ---------------------------------------------------------------------------------------------

    def _drain_commands(self, link: BrokerLink) -> None:
        for _ in range(BATCH):
            try:
                header, *rest = receive(link.inbox, copied=1)
            except zmq.Again:
                return
            except MalformedMessage as error:
                log.warning("dropped a command: %s", error)
                continue
            try:
                self._handle_command(link, codec.decode(header, StageCommand), rest)  # type: ignore[arg-type]
            except MalformedMessage as error:
                log.warning("dropped a malformed command: %s", error)

    def _handle_command(self, link: BrokerLink, command: StageCommand, rest: Sequence[Frame]) -> None:
        match command:
            case StartPhase():
                self._start(_Waiting(link, command, rest, self._loop.clock.now() + LOCAL_QUIET_S))
            case StopPhase():
                self._waiting = [
                    one for one in self._waiting if (one.link, one.command.job_id) != (link, command.job_id)
                ]
                stage_id = self._table.holder(link.broker, command.job_id, command.attempt)
                if stage_id is not None:
                    self._tell(stage_id, command)
            case ShowTurns():
                self._ask_turns(link, command)
            case EventsNoted():
                self._blocks.noted(link.broker, command.numbers)
                for stage_id, numbers in link.events.noted(command.numbers).items():
                    self._tell(stage_id, EventsNoted(numbers))
            case CloseSandbox():
                stage_id = self._table.stages.on_node(self._node)
                if stage_id is not None:
                    self._tell(stage_id, command)
            case ForgetBlocks():
                self._blocks.forget(link.broker, command.block_ids)
            case SendBlocks():
                self._send_blocks(link, command.block_ids)
            case SlotDemand():
                link.demand, link.demand_at = command, self._loop.clock.now()
            case StageWelcome():
                self._join(link, command)
            case StageRefused():
                self._refused = command
                self._loop.stop()

    def _join(self, link: BrokerLink, welcome: StageWelcome) -> None:
        self._heartbeat_s = welcome.heartbeat_s
        link.keep = welcome.keep
        link.answered(self._loop.clock.now())
        self._next_report = self._loop.clock.now()
        if self._stages is not None:
            self._stages.welcome_all(welcome)  # the backend broker's endpoint may have changed
        else:
            self._stages = StageConnections(self._loop.context, None, welcome)
            log.info("node %s joined %s", self._node, link.place)

    def _send_blocks(self, link: BrokerLink, block_ids: Iterable[str]) -> None:
        for block_id in block_ids:
            try:
                link.send_block(block_id, self._blocks.read(block_id))
            except OSError as error:
                log.warning("blocks cannot be read now, and the broker will ask again: %s", error)
                return

    def _start(self, waiting: _Waiting) -> None:
        link, command, rest, _ = waiting
        text, kept = command.text, command.text.kept if command.text is not None else None
        if len(rest) != (1 if text is None or kept is not None else 2):
            needed = "1 frame (job)" if text is None or kept is not None else "2 frames (job, token ids)"
            raise MalformedMessage(f"start_phase of {command.phase} needs {needed}, got {len(rest)}")
        try:
            packed = rest[0]
            task = _task_of(packed.buffer if isinstance(packed, zmq.Frame) else packed).task
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MalformedMessage(f"job {command.job_id} cannot be read: {error}") from error
        held = self._table.start(link.broker, command, task)
        if held is None:
            self._waiting.append(waiting)
            return
        try:
            ids = [self._block_server.token_ids(kept, text.tokens)] if text is not None and kept is not None else []
        except OSError as error:
            log.warning("a trajectory is not scored yet: %s", error)
            self._table.ended(held.stage_id, command.job_id, command.attempt)
            self._waiting.append(waiting)
        else:
            self._tell(held.stage_id, msgspec.structs.replace(command, origin=link.broker), *rest, *ids)

    def _ask_turns(self, link: BrokerLink, question: ShowTurns) -> None:
        if (stage_id := self._table.holder(link.broker, question.job_id, question.attempt)) is None:
            link.show_none(question)
        else:
            self._tell(stage_id, msgspec.structs.replace(question, origin=link.broker))

    # From stage processes ---------------------------------------------------------------------------------------------

    def _drain_events(self) -> None:
        for _ in range(BATCH):
            try:
                header, *rest = receive(self._events, copied=1)
            except zmq.Again:
                return
            except MalformedMessage as error:
                log.warning("dropped a stage event: %s", error)
                continue
            try:
                self._handle_event(codec.decode(header, StageEvent), rest)  # type: ignore[arg-type]
            except MalformedMessage as error:
                log.warning("dropped a malformed stage event: %s", error)

    def _handle_event(self, event: StageEvent, rest: Sequence[Frame]) -> None:
        now = self._loop.clock.now()
        if self._stages is None:
            if isinstance(event, StageReport) and event.role not in self._announced:
                self._announced[event.role] = event
                self._report_soon()
            return  # stage processes repeat their reports
        match event:
            case StageReport():
                if self._stages.reported(event, "", now, self._table.stages):
                    self._report_of(event, now)
                    self._note_addresses({one: (event.running.get(one, 0), at) for one, at in event.addresses.items()})
            case MemberAlive():
                self._note_backends(event)
                self._note_addresses(event.addresses)
                if not self._table.alive(event, now):
                    self._stages.welcome(event.member)
            case StageLeaving():
                self._lose(event.stage_id, self._table.left(event.stage_id), "its stage process has ended", lost=False)
                self._stages.left(event.stage_id)
                self._report_soon()
            case PhaseDone() | PhaseFailed():
                self._table.ended(event.stage_id, event.job_id, event.attempt)
                link_of = self._links.get(event.origin)
                if link_of is not None:
                    self._end(link_of, event, rest)
                self._start_waiting()
            case TurnsShown():
                if (link := self._links.get(event.origin)) is not None:
                    link.show(event, rest)
            case BlockSent():
                log.warning("a stage process sent a block, which only nodes do")

    def _links_of(self, job_id: str, attempt: int) -> list[BrokerLink]:
        return [link for link in self._links.values() if self._table.holder(link.broker, job_id, attempt) is not None]

    def _note_addresses(self, addresses: Mapping[str, tuple[int, str]]) -> None:
        for job_id, (attempt, address) in addresses.items():  # sent at once: programs wait for addresses
            for link in self._links_of(job_id, attempt):
                if link.note_address(job_id, address):
                    self._next_report = self._loop.clock.now()

    def _note_backends(self, alive: MemberAlive) -> None:
        for job_id, (attempt, backend) in alive.backends.items():
            for link in self._links_of(job_id, attempt):
                link.note_backend(job_id, backend)

    def _end(self, link: BrokerLink, event: PhaseDone | PhaseFailed, rest: Sequence[Frame]) -> None:
        try:
            link.end(*self._block_server.take_end(self._node, link, event, rest))
        except OSError as error:
            log.warning("scores wait until they are sent again: %s", error)

    def _report_of(self, report: StageReport, now: float) -> None:
        slots = self._table.slots(report.role)
        if report.stage_id not in self._table.stages:
            log.info("%s process %s joined: %d slots", report.role, report.stage_id, report.slots)
        self._table.reported(report, now, next(iter(self._links)))
        self._announced.pop(report.role, None)
        if self._table.slots(report.role) != slots:
            self._report_soon()

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._start(each)

    def _give_up_waiting(self, now: float) -> None:
        late = [one for one in self._waiting if one.until <= now]
        self._waiting = [one for one in self._waiting if one.until > now]
        for link, command, _, _ in late:
            why = f"it could not start there within {LOCAL_QUIET_S:g} s"
            link.give_back(command.job_id, command.attempt, command.phase, why)

    def _lose(self, stage_id: str, held: Sequence[HeldPhase], why: str, *, lost: bool) -> None:
        """Return the phases of a stage process that is gone, and forget its unnoted events."""
        for link in self._links.values():
            forgotten = link.events.forget(stage_id)
            self._blocks.noted(link.broker, forgotten)
            if forgotten:
                link.want_full()  # lists the blocks; the broker releases the unknown ones
        for one in held:
            link_of = self._links.get(one.broker)
            if link_of is not None:
                link_of.give_back(one.job_id, one.attempt, one.phase, why, lost=lost)

    # Time -------------------------------------------------------------------------------------------------------------

    def _housekeep(self) -> float:
        now = self._loop.clock.now()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            for name, place in self._places().items():
                if name in self._links:
                    self._links[name].connect(place)
            for link in self._links.values():
                if link.problem and link.problem != self._told.get(link.broker):
                    self._told[link.broker] = link.problem
                    log.warning("%s", link.problem)
        if now >= self._next_report:
            self._next_report = now + self._heartbeat_s
            if self._loop.has_read_all:
                self._look_at_stages(now)
            self._give_up_waiting(now)
            self._report(now)
        return max(0.0, self._next_report - now)

    def _set_gauges(self) -> None:
        for role in self._table.roles():
            catalog.NODE_SLOTS.set(self._table.slots(role), role)
            catalog.NODE_SLOTS_BUSY.set(sum(self._table.used(role).values()), role)
        catalog.NODE_PHASES_WAITING.set(len(self._waiting))
        blocks, size_bytes = self._blocks.kept()
        catalog.NODE_BLOCKS.set(blocks)
        catalog.NODE_BLOCKS_BYTES.set(size_bytes)

    def _hand_over(self) -> None:
        """Send unfetched blocks to the brokers, until all are delivered or `HAND_OVER_S` has passed."""
        left = {name: list(self._blocks.ids(name)) for name, link in self._links.items() if link.welcomed}
        until = self._loop.clock.now() + HAND_OVER_S
        under_way: dict[str, set[str]] = {name: set() for name in left}

        def housekeep() -> float:
            for name, sent in under_way.items():
                sent.intersection_update(self._blocks.ids(name))
                while left[name] and len(sent) < HANDED_AT_ONCE:
                    block_id = left[name].pop()
                    sent.add(block_id)
                    self._send_blocks(self._links[name], [block_id])
            if self._loop.clock.now() >= until or not any((*left.values(), *under_way.values())):
                self._loop.stop()
            return min(self._housekeep(), max(0.0, until - self._loop.clock.now()))

        self._loop.resume()
        self._loop.run(housekeep, lambda: None)

    def _look_at_stages(self, now: float) -> None:
        if self._stages is None:
            return
        for member in self._stages.refusing(self._table.stages.quiet()):
            self._table.stages.disconnected(member, now)
        for stage_id, held in self._table.expire(now).items():
            self._lose(stage_id, held, "its stage process died or hangs", lost=True)
        self._stages.drop_silent(self._table.stages, now - LOCAL_LEASE_S)

    def _report(self, now: float) -> None:
        holding = {Phase.RUN} if any(self._blocks.ids(name) for name in self._links) else set()
        roles = sorted({*self._announced, *self._table.roles(), *holding})
        shares = {role: self._shares(role, now) for role in roles}
        facts = self._read_facts()
        for link in self._links.values():
            running = self._table.running(link.broker)
            pools = [
                link.full(
                    role,
                    running.get(role, {}),
                    self._blocks.ids(link.broker) if role == Phase.RUN else None,
                    node=self._node,
                    place=self._place,
                    slots=shares[role][link.broker],
                    tasks=self._announced[role].tasks if role in self._announced else self._table.tasks(role),
                    draining=role not in self._announced and self._table.is_draining(role),
                )
                for role in roles
            ]
            link.report(running, pools, facts)

    def _shares(self, role: Phase, now: float) -> dict[str, int]:
        slots = self._table.slots(role)
        if len(self._links) == 1:
            return dict.fromkeys(self._links, slots)
        there = [link for link in self._links.values() if link.welcomed and link.demand_at + DEMAND_LOST_S > now]
        used = self._table.used(role)
        shares = {name: used[name] for name in self._links}
        if there:
            demands = {link.broker: Demand(link.demand.slots.get(role, 0), link.demand.weight) for link in there}
            shares |= divide(slots, demands, used, self._node)
        return shares

    def _report_soon(self) -> None:
        """Report before the next heartbeat that the number of slots changed."""
        for link in self._links.values():
            link.want_full()
        self._next_report = self._loop.clock.now()

    def _tell(self, stage_id: str, command: StageCommand, *frames: Frame) -> None:
        if self._stages is not None:
            self._stages.send(stage_id, command, *frames)
