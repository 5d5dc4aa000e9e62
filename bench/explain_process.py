"""Stage processes and engine hosts of bench/explain.py: `explain_process.py CONNECT BACKEND_BROKER RUN_DIR WHAT…`.

Each WHAT is `NODE:ROLE:SLOTS`, `engine:NAME` or `engine:NAME:KV`, the tokens that its KV cache holds, and becomes its
own process, forked once everything is imported. An instance lists the parts of its rollout, and the duration of each
part by node and engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import uvloop
import zmq

from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import SandboxFailed
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.kv_figures import KvFigures
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import IM_END, TOOL_CALL, TOOL_CALL_END, decode, encode
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq.stages.stage_process import StageOptions, StageProcess
from prorl_zmq.system.processes import die_with_parent, stop_signals
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.tool import Arguments, Tool
from prorl_zmq.tools.toolbox import Toolbox
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.inference.engine import EngineDescription
    from prorl_zmq.wire.messages.jobs import Sampling

QUICK_S = 0.03
"""What a part takes that is not made slow."""
CONTEXT_TOKENS = 4_096
"""Of engines with a KV cache; at first half of it counts as the mean context."""
COMMON_TOKENS = 16
"""The beginning that all prompts share."""


class Staged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long each part of a rollout takes, in seconds."""

    init_s: float = QUICK_S
    cold_s: float = 0.0
    """The first INITs of a process."""
    own_s: float = 0.0
    """RUN's own code."""
    engine_s: float = QUICK_S
    """Each of the two turns."""
    tools: dict[str, float] = msgspec.field(default_factory=lambda: {"search": QUICK_S})
    """`bash` acts in a sandbox, which INIT makes then."""
    eval_s: float = QUICK_S
    node_times: dict[str, float] = {}
    """How many times as long all but the engines takes on a node."""
    engine_times: dict[str, float] = {}
    one_by_one: bool = False
    """Engines serve one request at a time."""
    context: int = 0
    """Characters that are added to the prompt, each a token."""
    token_s: float = 0.0
    """What an engine takes for each prompt token that it has not cached; it computes one prompt at a time."""
    fails: str = ""
    """A file whose absence says that RUN has yet to fail, after its work."""


class SearchArguments(Arguments, frozen=True):
    seconds: float


class SearchTool(Tool[SearchArguments]):
    """Waits."""

    name = "search"
    description = "Waits."
    takes = SearchArguments

    async def call(self, arguments: SearchArguments, timeout_s: float) -> str:
        """Wait."""
        del timeout_s
        await asyncio.sleep(arguments.seconds)
        return "found"


class BrowseTool(SearchTool):
    """Waits, under another name."""

    name = "browse"


class StagedHandler(AgentHandler[Staged]):
    """Does what the instance says."""

    task = "staged"
    instance_type = Staged

    def __init__(self, node: str, slots: int) -> None:
        self._node = node
        self._cold = slots

    async def init(self, phase: Any) -> dict[str, Any]:
        """Make a sandbox if `bash` is among the tools."""
        staged: Staged = phase.instance
        self._cold -= 1
        await self._spend(staged, staged.cold_s if staged.cold_s and self._cold >= 0 else staged.init_s)
        if "bash" not in staged.tools:
            return {}
        return {"sessions": await Toolbox(await phase.create_sandbox(SandboxSpec()), ("bash",)).start()}

    async def run(self, phase: Any) -> dict[str, Any]:
        """Converse, with tools that take their time."""
        staged: Staged = phase.instance
        await self._spend(staged, staged.own_s)
        tools: list[Tool[Any]] = [SearchTool(), BrowseTool()]
        if phase.sandbox is not None:
            tools += Toolbox(phase.sandbox, ("bash",)).tools(phase.data["sessions"])
        times = staged.node_times.get(self._node, 1.0)
        wanted = {"tools": {name: seconds * times for name, seconds in staged.tools.items()}, "s": staged.engine_s}
        wanted |= {"times": staged.engine_times, "one_by_one": staged.one_by_one, "token_s": staged.token_s}
        wanted |= {"context": "x" * staged.context}
        await phase.converse([ChatMessage(Role.USER, msgspec.json.encode(wanted).decode())], tools)
        if staged.fails and _first_time(Path(staged.fails)):
            raise SandboxFailed("the disk is on fire")
        return {}

    async def eval(self, phase: Any) -> Evaluation:
        """Find everything right."""
        await self._spend(phase.instance, phase.instance.eval_s)
        return Evaluation(1.0)

    async def _spend(self, staged: Staged, seconds: float) -> None:
        await asyncio.sleep(seconds * staged.node_times.get(self._node, 1.0))


def _first_time(mark: Path) -> bool:
    first = not mark.exists()
    mark.touch()
    return first


class OtherHandler(StagedHandler):
    """The same under another name."""

    task = "staged-b"


class StagedEngine(EmbeddedEngine):
    """An embedded engine in all but what it says: it calls the tools, then ends.

    Args:
        name: its name in an instance's `engine_times`.
        kv_tokens: what its prefix cache holds, from which the conversation without a turn for longest is dropped; 0: it
            has none.
    """

    def __init__(self, name: str, kv_tokens: int = 0) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._name = name
        self._turn = asyncio.Lock()
        self._kv_tokens = kv_tokens
        self._cache: OrderedDict[str, int] = OrderedDict()
        """The tokens of each job that are cached, the last one used at the end."""
        self._waiting = 0

    @property
    def description(self) -> EngineDescription:
        """That of an embedded engine, with figures of its cache if it has one, and the context of the runs."""
        described = super().description
        return replace(described, kv=True, context_tokens=CONTEXT_TOKENS) if self._kv_tokens else described

    def kv_figures(self, now: float) -> KvFigures:
        """Return what the cache holds: only running requests use it."""
        del now
        return KvFigures(self._kv_tokens, 0.0, 0, self._waiting)

    async def set_weight_version(self, weight_version: int) -> None:
        """Take new weights, with which nothing is cached."""
        await super().set_weight_version(weight_version)
        self._cache.clear()

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        """Say what comes next, as late as the prompt asks for."""
        del sampling, stop_token_ids
        conversation = decode(token_ids)
        wanted = msgspec.json.decode(conversation.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0])
        cached = await self._compute(job_id, len(token_ids), wanted["token_s"])
        seconds = wanted["s"] * wanted["times"].get(self._name, 1.0)
        if wanted["one_by_one"]:
            async with self._turn:
                await asyncio.sleep(seconds)
        else:
            await asyncio.sleep(seconds)
        first = "<|im_start|>tool" not in conversation and "<tool_response>" not in conversation
        pieces = [_call(name, s) for name, s in wanted["tools"].items()] if first else [encode("Done.")]
        ids = np.concatenate([*pieces, [IM_END]]).astype(np.int32)
        self._keep(job_id, len(token_ids) + len(ids))
        span = VersionSpan(self.weight_version, 0, len(ids))
        return Generation(ids, np.zeros(len(ids), np.float32), (span,), "stop", cached)

    async def _compute(self, job_id: str, prompt_tokens: int, token_s: float) -> int:
        """Compute what is not cached of a prompt, after the prompts before it; return the cached tokens."""
        self._waiting += 1
        try:
            async with self._turn:
                cached = self._cache.get(job_id, COMMON_TOKENS if self._cache else 0)
                self._keep(job_id, prompt_tokens)
                await asyncio.sleep((prompt_tokens - cached) * token_s)
        finally:
            self._waiting -= 1
        return cached

    def _keep(self, job_id: str, tokens: int) -> None:
        self._cache[job_id] = tokens
        self._cache.move_to_end(job_id)
        while sum(self._cache.values()) > self._kv_tokens:
            self._cache.popitem(last=False)


def _call(name: str, seconds: float) -> NDArray[np.int32]:
    arguments = {"command": f"sleep {seconds}"} if name == "bash" else {"seconds": seconds}
    call = msgspec.json.encode({"name": name, "arguments": arguments}).decode()
    return np.concatenate([[TOOL_CALL], encode(call), [TOOL_CALL_END]]).astype(np.int32)


async def serve_engine(name: str, kv_tokens: int, backend_broker: str, run_dir: str) -> None:
    """Serve an engine until SIGTERM."""
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(endpoint=f"ipc://{run_dir}/{name}", backend_broker=backend_broker, backend_id=name)
        await EngineHost(context, StagedEngine(name, kv_tokens), options).run(stop)


def serve(what: str, connect: str, backend_broker: str, run_dir: str) -> None:
    """Be one of the processes."""
    if what.startswith("engine:"):
        name, _, kv_tokens = what.removeprefix("engine:").partition(":")
        uvloop.run(serve_engine(name, int(kv_tokens or 0), backend_broker, run_dir))
        return
    node, role, slots = what.split(":")
    options = StageOptions(
        role=Phase(role),
        slots=int(slots),
        connect=connect,
        node=node,
        run_dir=Path(run_dir),
        sandbox="process",
    )
    handlers = {kind.task: kind(node, int(slots)) for kind in (StagedHandler, OtherHandler)}
    uvloop.run(StageProcess(options, handlers).run())


def main() -> None:
    """Fork each process, say the ids, and end them all with this one."""
    connect, backend_broker, run_dir, *all_of_them = sys.argv[1:]
    parent = os.getpid()
    children = []
    for what in all_of_them:
        child = os.fork()
        if not child:
            die_with_parent(parent, signal.SIGTERM)
            serve(what, connect, backend_broker, run_dir)
            return
        children.append(child)
    print(*children, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: [_end(child) for child in children])
    for child in children:
        os.waitpid(child, 0)


def _end(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)


if __name__ == "__main__":
    main()
