"""The processes of `gateway.py`: our proxy and its engine host, rllm-model-gateway and its upstream.

    clients → 256 `ModelServer`s, a `HarnessModel` each → `EngineClient` → ZeroMQ → engine host
    clients → rllm-model-gateway, a session each                         → HTTP   → `peers/vllm_answers.py`
    clients → `peers/aiohttp_answers.py`, which answers by itself

The measured process has its own core; its clients and upstream have the others. Both upstreams answer at once, with the
same number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import uvloop
import zmq
from gateway_conversations import COMMAND, SAID, TURNS
from service import free_port

from prorl_zmq import EpisodeLimits, Job, Sampling
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.inference.client import EngineClient
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.hosting.host import HostOptions
from prorl_zmq.inference.hosting.host_process import run_engine_host
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import IM_END, TOOL_CALL, TOOL_CALL_END, encode
from prorl_zmq.model_proxy.server import ModelServer
from prorl_zmq.stages.episode import Episode, JobPolicy
from prorl_zmq.stages.harness.adapter import load_adapter
from prorl_zmq.stages.harness.harness_model import HarnessModel
from prorl_zmq.system.memory import give_memory_back
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.wire.messages.backends import Backend
from prorl_zmq.wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from prorl_zmq.stages.harness.adapter import Adapter

CORES = sorted(os.sched_getaffinity(0))
OWN_CORE, OTHER_CORES = CORES[:1], CORES[1:] or CORES
START_S = 60.0
INSTALL_S = 300.0
PEER = "rllm-model-gateway 0.1.0"
PEER_PACKAGES = ("rllm-model-gateway==0.1.0", "uvloop", "httptools")
"""Uvicorn takes the loop and the parser by itself where they are, and is quicker with them."""
UPSTREAM = Path(__file__).parent / "peers" / "vllm_answers.py"
BARE = "bare aiohttp server"
BARE_SERVER = Path(__file__).parent / "peers" / "aiohttp_answers.py"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SPAWN = multiprocessing.get_context("spawn")


def reply_ids() -> NDArray[np.int32]:
    """Return what the engine says in each turn."""
    call = encode(json.dumps({"name": "bash", "arguments": {"command": COMMAND}}))
    return np.array([*encode(SAID), TOOL_CALL, *call, TOOL_CALL_END, IM_END], np.int32)


class Usage(NamedTuple):
    """What a process has used."""

    cpu_s: float
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Look at a process."""
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return cls((int(user) + int(system)) * TICK_S, int(pages) * PAGE_BYTES)


class QuickEngine(EmbeddedEngine):
    """An engine that answers every prompt at once with the same turn."""

    def __init__(self) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        ids = reply_ids()
        logprobs = -np.random.default_rng(0).random(len(ids), np.float32)
        self._said = Generation(ids, logprobs, (VersionSpan(0, 0, len(ids)),), "stop")

    async def generate(
        self,
        token_ids: NDArray[np.int32],  # noqa: ARG002
        sampling: Sampling,  # noqa: ARG002
        stop_token_ids: Sequence[int],  # noqa: ARG002
        job_id: str,  # noqa: ARG002
    ) -> Generation:
        """Answer."""
        return self._said


def _host(endpoint: str) -> None:
    die_with_parent()
    os.sched_setaffinity(0, OTHER_CORES)
    logging.disable(logging.WARNING)  # that no backend broker answers is meant

    async def start() -> QuickEngine:
        return QuickEngine()

    run_engine_host(start, HostOptions(endpoint=endpoint, backend_broker=f"{endpoint}-nobody", backend_id="bench"))


def _proxy(orders: Connection, endpoint: str) -> None:
    die_with_parent()
    os.sched_setaffinity(0, OWN_CORE)
    give_memory_back()  # as stage processes do
    uvloop.run(_serve(orders, endpoint))


async def _serve(orders: Connection, endpoint: str) -> None:
    """Open so many conversations as is ordered, close them at the next order, and so on; 0 ends it."""
    adapter = load_adapter("command")
    with zmq.Context() as context:
        client = EngineClient(context, reconnect_s=START_S)
        await client.health(endpoint, START_S)
        while count := await asyncio.to_thread(orders.recv):
            rollouts = [await _Rollout.start(client, endpoint, adapter, number) for number in range(count)]
            orders.send([rollout.url for rollout in rollouts])
            await asyncio.to_thread(orders.recv)
            orders.send([await rollout.end() for rollout in rollouts])
            del rollouts
        client.close()


class _Rollout(NamedTuple):
    """One rollout, as a RUN process has it, without the sandbox."""

    model: HarnessModel
    server: ModelServer
    episode: Episode
    url: str

    @classmethod
    async def start(cls, client: EngineClient, endpoint: str, adapter: Adapter, number: int) -> _Rollout:
        job = Job(
            task="bench",
            instance={},
            sampling=Sampling(max_tokens=512),
            episode=EpisodeLimits(max_turns=TURNS, max_tokens=100_000),
        )
        generate = partial(client.generate, Backend(backend_id="bench", endpoint=endpoint), f"job-{number}")
        episode = Episode()
        policy = JobPolicy(generate, EmbeddedChatFormat(), 0, job, episode)
        model = HarnessModel(policy, refusal_status=adapter.refusal_status, kind_of=adapter.kind_of)
        server, listener = ModelServer(model), socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        await server.start(listener)
        return cls(model, server, episode, url)

    async def end(self) -> int:
        """Return the generated tokens of the trajectory; 0: the conversation fell apart."""
        await self.server.close(timeout_s=1.0)
        await self.model.finish(["main"])
        whole = self.episode.metrics["main_turns"] == TURNS and len(self.episode.trajectory.segments) == 0
        return self.episode.metrics["main_tokens"] if whole else 0


class OurSide:
    """Our proxy's process."""

    def __init__(self, orders: Connection, pid: int) -> None:
        self._orders = orders
        self.pid = pid

    @contextmanager
    def open(self, count: int, captured: Counter[str]) -> Iterator[list[str]]:
        """Have so many rollouts; count the tokens that were generated and those that were captured."""
        self._orders.send(count)
        yield self._orders.recv()
        self._orders.send(None)
        captured["tokens"] += sum(self._orders.recv())
        captured["generated"] += count * TURNS * len(reply_ids())


@contextmanager
def our_side(folder: str) -> Iterator[tuple[OurSide, str]]:
    """Run our proxy and its engine host; gives the proxy and the host's endpoint."""
    endpoint = f"ipc://{folder}/engine"
    ours, theirs = _SPAWN.Pipe()
    processes = [
        _SPAWN.Process(target=_host, args=(endpoint,), daemon=True),
        _SPAWN.Process(target=_proxy, args=(theirs, endpoint), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        assert processes[1].pid is not None
        yield OurSide(ours, processes[1].pid), endpoint
    finally:
        for process in processes:
            process.terminate()
            process.join()


class PeerSide(NamedTuple):
    """The peer's process."""

    pid: int
    url: str
    upstream: str

    @contextmanager
    def open(self, count: int) -> Iterator[list[str]]:
        """Have so many sessions, which begin with their first call; at the end the peer forgets them."""
        sessions = [f"{self.url}/sessions/{number}" for number in range(count)]
        yield [f"{session}/v1" for session in sessions]
        for session in sessions:
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=START_S).close()


def peer_python() -> str:
    """Return the interpreter that has the peer, in an environment of its own within this one.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be installed here.
    """
    folder = Path(sys.prefix) / "rllm-model-gateway"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
        subprocess.run(command, capture_output=True, timeout=INSTALL_S, check=True)
        ready.touch()
    return str(python)


@contextmanager
def peer_side(python: str) -> Iterator[PeerSide]:
    """Run the peer with its store in memory, and its upstream."""
    port, upstream_port = free_port(), free_port()
    url, upstream = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{upstream_port}/v1"
    reply = json.dumps({"text": SAID, "command": COMMAND, "tokens": len(reply_ids())})
    where = ("--host", "127.0.0.1", "--port", str(port), "--worker", upstream)
    commands = (
        (OTHER_CORES, [sys.executable, str(UPSTREAM), str(upstream_port), reply]),
        (OWN_CORE, [python, "-m", "rllm_model_gateway", *where, "--store", "memory", "--log-level", "warning"]),
    )
    processes = [
        subprocess.Popen(command, preexec_fn=partial(_placed, os.getpid(), cores))  # noqa: PLW1509 - as in engines.py
        for cores, command in commands
    ]
    try:
        _await_answer(f"http://127.0.0.1:{upstream_port}/health")
        _await_answer(f"{url}/health")
        yield PeerSide(processes[1].pid, url, upstream)
    finally:
        for process in processes:
            process.terminate()
            process.wait(20)


@contextmanager
def bare_side() -> Iterator[tuple[int, str]]:
    """Run a bare aiohttp server on the core of what is measured; gives its process and its URL."""
    port = free_port()
    reply = json.dumps({"text": SAID, "command": COMMAND})
    process = subprocess.Popen(
        [sys.executable, str(BARE_SERVER), str(port), reply],
        preexec_fn=partial(_placed, os.getpid(), OWN_CORE),  # noqa: PLW1509 - as in engines.py
    )
    try:
        _await_answer(f"http://127.0.0.1:{port}/health")
        yield process.pid, f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)


def _placed(parent: int, cores: Sequence[int]) -> None:
    die_with_parent(parent)
    os.sched_setaffinity(0, cores)


def _await_answer(url: str) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=START_S).close()
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return
