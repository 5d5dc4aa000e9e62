"""Eight adapters on one real vLLM through our host, as `models.py` measures them.

A tiny Qwen3 and adapters with random matrices of all linear layers, made by peft, so that each adapter's distributions
differ much from the others'. Calls are mixed over the adapters, and each of these gets new versions meanwhile; every
call's tokens are rescored by peft's own forward pass with every version of every adapter, and must be those of the
version that the answer names. Speeds are tokens per CPU second of the host and vLLM's processes, in turns. The engine
is killed with all its processes; a new host has only the folder of the first one's copies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import warnings
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import peft
import psutil
import torch
import transformers
import zmq
from engines import FLAGS, Engines

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.client import EngineClient
from prorl_zmq.security.request_connection import AsyncRequestConnection
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import Backend
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.engines import AnyEngineReply, EngineReady, WeightUpdate
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray

SLOTS, RANK = 8, 8
MODELS = tuple(f"a{number}" for number in range(SLOTS))
PROMPT, ANSWER = 16, 20
"""Tokens of a mixed call."""
AT_ONCE = 32
SPEED_PROMPT, SPEED_ANSWER = 128, 64
CLOSE = 1e-4
VLLM_FLAGS = (*FLAGS, "--max-model-len=2048", f"--kv-cache-memory-bytes={64 << 20}")
HOST = Path(__file__).with_name("models_host.py")
START_S, ANSWER_S = 60.0, 300.0


class Call(NamedTuple):
    """An answer to a mixed call."""

    model: str
    versions: set[int]
    """Of its tokens, as the host says."""
    current: set[int]
    """The versions that were the newest, or became so, while it ran."""
    ids: NDArray[np.int32]
    """Prompt and answer."""
    logprobs: NDArray[np.float32]


class Adapters(NamedTuple):
    """What was measured."""

    calls: int
    wrong: int
    """Calls whose tokens are of another adapter or version than the answer names, or that it may not have."""
    error: float
    """Largest difference of a log-prob to peft."""
    nearest_other: float
    """The least of the largest differences of a call to another adapter or version."""
    one: float
    """Tokens per CPU second of one adapter."""
    eight: float
    kept: float
    """Eight to one, the median of the turns."""
    publish_ms: float
    """From the update to the first token of the new version, the median."""
    first_ms: float
    """A first token of a version that is loaded."""
    restart_s: float
    """From the start of the new host to the first token of the last adapter, vLLM's start included."""
    restored: int
    """Adapters that came back with their version and log-probs."""


class Host:
    """A client of the host, and the versions that it published."""

    def __init__(self, engines: Engines, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str) -> None:
        self.backend = Backend(backend_id="bench", endpoint=endpoint)
        self.client = EngineClient(context, reconnect_s=START_S)
        self._updates = AsyncRequestConnection(context, endpoint, None, curve_key="", hint="")
        self.process = psutil.Process(engines.pid(name))
        self.current: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        """The versions of updates that have begun."""

    def close(self) -> None:
        self.client.close()
        self._updates.close()

    async def publish(self, model: str, version: int, path: Path) -> None:
        """Have the host serve a version of an adapter."""
        self._newest[model] = version
        update = WeightUpdate(new_id(), "load", version, path=str(path), model=model)
        (head, *_) = await self._updates.ask_frames(update, time.monotonic() + ANSWER_S)
        reply = codec.decode(head, AnyEngineReply)
        assert isinstance(reply, EngineReady), reply
        self.current[model] = version

    async def ask(self, model: str, prompt: NDArray[np.int32], tokens: int) -> Call:
        """Ask for so many tokens of the newest version."""
        sampling, before = Sampling(max_tokens=tokens), self.current[model]
        done = await self.client.generate(self.backend, f"job-{model}", prompt, sampling, (), ANSWER_S, adapter=model)
        assert len(done.token_ids) == tokens
        versions = {span.weight_version for span in done.spans}
        ids = np.concatenate([prompt, done.token_ids])
        newest = self._newest.get(model, before)
        return Call(model, versions, {*range(before, newest + 1)}, ids, done.logprobs)

    async def ask_once_loaded(self, model: str, prompt: NDArray[np.int32], tokens: int) -> Call:
        """Ask a host that may still be loading its adapters; it registers with a broker when it has them."""
        until = time.monotonic() + START_S
        while True:
            try:
                return await self.ask(model, prompt, tokens)
            except EngineFailed:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.05)

    def cpu_s(self) -> float:
        """Give the CPU seconds of the host and of vLLM's processes."""
        processes = [self.process, *self.process.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in processes)


def make_adapter(base: Path, folder: Path, seed: int) -> Path:
    """Have peft save an adapter with random matrices of all linear layers."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def rescored(base: Path, adapter: Path, calls: Sequence[Call]) -> NDArray[np.float32]:
    """Give peft's log-probs of the calls' answers, float32 [N, ANSWER]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        applied = peft.PeftModel.from_pretrained(model, adapter).eval()
    found = []
    with torch.inference_mode():
        for start in range(0, len(calls), 250):
            ids = torch.tensor(np.array([call.ids for call in calls[start : start + 250]], np.int64))
            scores = torch.log_softmax(applied(input_ids=ids[:, :-1]).logits, -1)
            found.append(scores.gather(2, ids[:, 1:, None])[:, -ANSWER:, 0].numpy())
    return np.concatenate(found)


def check(base: Path, adapters: dict[tuple[str, int], Path], calls: Sequence[Call]) -> tuple[int, float, float]:
    """Give how many calls are wrong, the largest difference to the right version, and the nearest to another one."""
    logprobs = np.stack([call.logprobs for call in calls])
    gaps = np.stack([np.abs(rescored(base, path, calls) - logprobs).max(1) for path in adapters.values()], 1)
    names = [*adapters]
    own = [names.index((call.model, min(call.versions))) for call in calls]
    rows = np.arange(len(calls))
    right = gaps[rows, own]
    others = gaps.copy()
    others[rows, own] = np.inf
    named = [len(call.versions) == 1 and call.versions <= call.current for call in calls]
    wrong = int((~np.array(named) | (right > CLOSE) | (gaps.argmin(1) != own)).sum())
    return wrong, float(right.max()), float(others.min())


async def mixed(host: Host, count: int, newer: Sequence[tuple[str, int, Path]]) -> list[Call]:
    """Answer calls over all adapters, and publish new versions meanwhile."""
    random, limit = np.random.default_rng(0), asyncio.Semaphore(AT_ONCE)
    calls: list[Call] = []

    async def one(model: str, prompt: NDArray[np.int32]) -> None:
        async with limit:
            calls.append(await host.ask(model, prompt, ANSWER))

    async def publish() -> None:
        for number, (model, version, path) in enumerate(newer, 1):
            while len(calls) < count * number // (len(newer) + 1):  # noqa: ASYNC110 - the calls make no event of it
                await asyncio.sleep(0.005)
            await host.publish(model, version, path)

    async with asyncio.TaskGroup() as group:
        group.create_task(publish())
        for draw in random.integers(0, SLOTS, count):
            group.create_task(one(MODELS[draw], prompt_of(random, PROMPT)))
    return calls


def prompt_of(random: np.random.Generator, tokens: int) -> NDArray[np.int32]:
    """Draw a prompt of plain tokens."""
    return random.integers(7, 1000, tokens).astype(np.int32)


async def speed(host: Host, models: Sequence[str], seed: int) -> float:
    """Give the tokens per CPU second of calls at once."""
    random, began = np.random.default_rng(seed), host.cpu_s()
    await asyncio.gather(
        *(
            host.ask(models[number % len(models)], prompt_of(random, SPEED_PROMPT), SPEED_ANSWER)
            for number in range(AT_ONCE)
        )
    )
    return AT_ONCE * SPEED_ANSWER / (host.cpu_s() - began)


async def first_ms(host: Host, model: str, random: np.random.Generator) -> float:
    """Give the milliseconds of a call of one token."""
    began = time.monotonic()
    await host.ask(model, prompt_of(random, PROMPT), 1)
    return 1e3 * (time.monotonic() - began)


@asynccontextmanager
async def host_of(engines: Engines, number: int) -> AsyncIterator[Host]:
    """Start a host, and end it."""
    name, endpoint = f"host-{number}", f"ipc://{engines.folder}/host-{number}"
    copies = engines.folder / "copies" / "service"
    words = (str(HOST), str(engines.model), endpoint, str(copies), str(SLOTS), str(RANK))
    engines.start(name, f"serves at {endpoint}", *words, *VLLM_FLAGS)
    await asyncio.to_thread(engines.wait)
    with zmq.Context() as context:
        host = Host(engines, context, endpoint, name)
        try:
            await host.client.health(endpoint, START_S)
            yield host
        finally:
            host.close()


async def measured(engines: Engines, count: int, turns: int) -> Adapters:
    """Measure all of it."""
    base, random = engines.model, np.random.default_rng(5)
    places = {(model, version): engines.folder / f"{model}-{version}" for version in (1, 2) for model in MODELS}
    for seed, folder in enumerate(places.values()):
        make_adapter(base, folder, seed)
    published, after = [], []
    async with host_of(engines, 0) as host:
        for model in MODELS:
            await host.publish(model, 1, places[model, 1])
        speeds = {name: [] for name in ("one", "eight")}
        for turn in range(-1, turns):
            both = {"one": MODELS[:1], "eight": MODELS}
            for name in ("one", "eight") if turn % 2 else ("eight", "one"):
                rate = await speed(host, both[name], turn + 1)
                if turn >= 0:  # the first turn warms up
                    speeds[name].append(rate)
        calls = await mixed(host, count, [(model, 2, places[model, 2]) for model in MODELS])
        for turn in range(turns):
            model, version = MODELS[turn % SLOTS], 3 + turn
            began = time.monotonic()
            await host.publish(model, version, places[model, 1 + turn % 2])
            await first_ms(host, model, random)
            published.append(1e3 * (time.monotonic() - began))
            after.append(await first_ms(host, model, random))
        versions = dict(host.current)
        os.killpg(host.process.pid, signal.SIGKILL)
    began = time.monotonic()
    async with host_of(engines, 1) as host:
        host.current = versions
        again = [await host.ask_once_loaded(model, prompt_of(random, PROMPT), ANSWER) for model in MODELS]
        restart_s = time.monotonic() - began
    rate = {name: float(np.median(values)) for name, values in speeds.items()}
    newest = {(m, v): places[m, v] if v < 3 else places[m, 1 + (v - 3) % 2] for m, v in versions.items()}
    wrong, error, nearest_other = check(base, places, calls)
    lost, restored_error, _ = check(base, newest, again)
    return Adapters(
        len(calls),
        wrong,
        max(error, restored_error),
        nearest_other,
        rate["one"],
        rate["eight"],
        float(np.median(np.array(speeds["eight"]) / speeds["one"])),
        float(np.median(published)),
        float(np.median(after)),
        restart_s,
        SLOTS - lost,
    )


def measure_adapters(python: str, count: int, turns: int) -> Adapters:
    """Measure with the interpreter that has vLLM."""
    with Engines(python) as engines:
        return asyncio.run(measured(engines, count, turns))
