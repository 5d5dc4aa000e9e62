"""Many emulated nodes in one process, for bench/nodes.py: they use a rollout broker as `brokers/node` does.

    Fleet    the handle: starts the process, asks it for its progress, ends it
    _Nodes   the process: one `BrokerLink` per node; a line on its standard input is answered with a `Told`

A node has three pools without stage processes: INIT and EVAL end at once, RUN after the job's `run_s`, with a
trajectory of a given number of tokens. Events that the broker has not confirmed are resent when it welcomes the node.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import uvloop
import zmq

from prorl_zmq.brokers.loop import MAX_SOCKETS
from prorl_zmq.brokers.node.broker_link import BrokerLink
from prorl_zmq.security.keyring import WORKER, Keyring
from prorl_zmq.security.zap_authenticator import ZapAuthenticator
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.wire import codec
from prorl_zmq.wire.async_socket import AsyncSocket
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.jobs import BlockHandle, Phase, SandboxHandle
from prorl_zmq.wire.messages.nodes import NodeFacts
from prorl_zmq.wire.messages.stages import (
    CloseSandbox,
    EventsNoted,
    PhaseDone,
    StageCommand,
    StageRefused,
    StageWelcome,
    StartPhase,
    StopPhase,
    Task,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq.wire.sockets import Frame

TASK = "emulated"
TASKS = (Task(TASK, {"at": "float", "run_s": "float"}),)
"""`at` is when the client submitted the job, on the machine's monotonic clock."""
SPREAD_S = 2.0
"""Within it all nodes of a fleet begin."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet is."""

    stage_events: str
    nodes: int
    slots: int
    """Of RUN; INIT and EVAL have 16."""
    bind: str = "tcp://127.0.0.1:*"
    keys: str = ""
    tokens: int = 0
    """Of each trajectory."""
    keeps: bool = False
    """The blocks of trajectories stay at the nodes, as far as the broker sees."""
    sandboxes: bool = False
    """Each job has a sandbox, so that its phases belong to one node."""


class Told(msgspec.Struct, frozen=True):
    """What a fleet has seen."""

    joined: int
    """Nodes that the broker has welcomed."""
    held: int
    starts: int
    stops: int
    """Phases that the broker has ended."""
    closes: int
    waits_s: tuple[float, ...]
    """From the client's `submit` to a node's RUN, of each job since the last question."""


class Fleet:
    """A fleet's process, for as long as the context."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__, msgspec.json.encode(self._settings).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads of ours
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self) -> Told:
        """Return what it has seen until now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Told)

    def wait_joined(self, limit_s: float = 120.0) -> None:
        """Wait until the broker has welcomed all of its nodes."""
        until = time.monotonic() + limit_s
        while (joined := self.ask().joined) < self._settings.nodes:
            if time.monotonic() > until:
                raise TimeoutError(f"{joined} of {self._settings.nodes} nodes joined")
            time.sleep(0.2)


class _Job(msgspec.Struct):
    """What is read of a packed job."""

    instance: dict[str, Any]


_job_of = msgspec.msgpack.Decoder(_Job).decode


class _Nodes:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.keyring = Keyring.load(settings.keys, WORKER) if settings.keys else None
        self.authenticator = ZapAuthenticator(self.context, self.keyring)
        self.block, self.turns = _trajectory(settings.tokens)
        self.starts = self.stops = self.closes = 0
        self.waits_s: list[float] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._nodes = [_Node(self, number) for number in range(self.settings.nodes)]
        self.authenticator.attend()
        for node in self._nodes:
            loop.call_later(random.uniform(0, SPREAD_S), node.beat)
        ended = loop.create_future()
        loop.add_reader(0, self._answer, ended)
        await ended

    def _answer(self, ended: asyncio.Future[None]) -> None:
        if not os.read(0, 1):
            ended.set_result(None)
            return
        joined = sum(node.link.welcomed for node in self._nodes)
        held = sum(len(node.running[Phase.RUN]) for node in self._nodes)
        told = Told(joined, held, self.starts, self.stops, self.closes, tuple(self.waits_s))
        self.waits_s.clear()
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.buffer.flush()


class _Node:
    def __init__(self, nodes: _Nodes, number: int) -> None:
        settings = nodes.settings
        self._nodes = nodes
        self._name = f"fleet-{os.getpid()}-{number}"
        self._slots = {Phase.INIT: 16, Phase.RUN: settings.slots, Phase.EVAL: 16}
        self.running: dict[Phase, dict[str, int]] = {role: {} for role in Phase}
        self._unnoted: dict[int, tuple[PhaseDone, Sequence[Frame]]] = {}
        self._last = 0
        self._heartbeat_s = 1.0
        bind = settings.bind.replace("*", self._name) if settings.bind.startswith("ipc:") else settings.bind
        self.link = BrokerLink(
            nodes.context,
            "rollout-0",
            self._name,
            self._name,
            settings.stage_events,
            bind,
            nodes.authenticator,
            nodes.keyring,
        )
        self._inbox = AsyncSocket(self.link.inbox, self._received)

    def beat(self) -> None:
        pools = [
            self.link.full(role, self.running[role], node=self._name, place=self._name, slots=slots, tasks=TASKS)
            for role, slots in self._slots.items()
        ]
        self.link.report(self.running, pools, NodeFacts(host=self._name))
        asyncio.get_running_loop().call_later(self._heartbeat_s, self.beat)

    def _received(self, frames: list[bytes | zmq.Frame]) -> None:
        command = codec.decode(frames[0], StageCommand)  # type: ignore[arg-type]
        match command:
            case StartPhase():
                self._start(command, frames[1])
            case StopPhase():
                self._nodes.stops += 1
                for phases in self.running.values():
                    if phases.get(command.job_id) == command.attempt:
                        del phases[command.job_id]
            case EventsNoted():
                for numbers in self.link.events.noted(command.numbers).values():
                    for number in numbers:
                        del self._unnoted[number]
            case CloseSandbox():
                self._nodes.closes += 1
            case StageWelcome():
                self._heartbeat_s = command.heartbeat_s
                self.link.answered(time.monotonic())
                for unnoted in self._unnoted.values():
                    self.link.end(*unnoted)
            case StageRefused():
                raise SystemExit(command.error.message)

    def _start(self, command: StartPhase, packed: bytes | zmq.Frame) -> None:
        if self.running[command.phase].get(command.job_id) == command.attempt:
            return
        self._nodes.starts += 1
        self.running[command.phase][command.job_id] = command.attempt
        if command.phase != Phase.RUN:
            self._end(command)
            return
        instance = _job_of(packed if isinstance(packed, bytes) else packed.buffer).instance
        self._nodes.waits_s.append(time.monotonic() - instance["at"])
        if instance["run_s"]:
            asyncio.get_running_loop().call_later(instance["run_s"], self._end, command)
        else:
            self._end(command)

    def _end(self, command: StartPhase) -> None:
        if self.running[command.phase].get(command.job_id) != command.attempt:
            return  # it was stopped
        del self.running[command.phase][command.job_id]
        self._last += 1
        phase, is_run, settings = command.phase, command.phase == Phase.RUN, self._nodes.settings
        path = f"/tmp/fleet/{command.job_id}"
        sandbox = settings.sandboxes and phase != Phase.EVAL
        done = PhaseDone(
            stage_id=self.link.pool(phase),
            job_id=command.job_id,
            attempt=command.attempt,
            phase=phase,
            number=self._last,
            sandbox=SandboxHandle("bubblewrap", path, self._name) if sandbox else None,
            reward=1.0 if phase == Phase.EVAL else None,
            stop_reason="finished" if is_run else "",
            timings={phase.value: 0.0},
            tokens=settings.tokens if is_run else 0,
            turns=self._nodes.turns if is_run else 0,
        )
        block = self._nodes.block if is_run else ()
        handle = BlockHandle(
            node=self._name, block_id=new_id(), checksum=zlib.crc32(*block) if block else 0,
            endpoint=self.link.endpoint, curve_key=self.link.curve_key, socket="/tmp/fleet/node/blocks.socket",
        )  # fmt: skip
        self._unnoted[self._last] = (done, block, handle if block and settings.keeps else None)
        self.link.end(*self._unnoted[self._last])


def _trajectory(tokens: int) -> tuple[Sequence[Frame], int]:
    """Return the block of a trajectory, if it has tokens, and its turns."""
    if not tokens:
        return (), 0
    sys.path.insert(0, str(Path(__file__).with_name("peers")))
    from trajectories import make_trajectory

    made = make_trajectory(0, tokens)
    return (made.block.data,), len(made.arrays.turns)


if __name__ == "__main__":
    uvloop.run(_Nodes(msgspec.json.decode(sys.argv[1], type=Settings)).run())
