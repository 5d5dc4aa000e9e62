"""The cost of three paths to an engine: our host and client over ZeroMQ, vLLM's HTTP token API, completions with ids.

Two equal vLLM engines with a tiny model compute on the same core, one in our host, one in vLLM's own server. They work
in turns, with a pause between, since vLLM's processes spin for a second after their work. A prompt's last 8 tokens are
its own, the rest is in the prefix cache, so the path and the engine's steps are measured. "The engine alone" is
`AsyncLLM` called in our host's process, with no socket (`inference_host.py`). HTTP uses aiohttp's pooled connections,
with msgspec for JSON.

Tokens per second: 64 new tokens a call; medians of rounds, ratios turn by turn. Added latency: calls of one new token,
one at a time; the median of the differences to the engine alone, turn by turn, and for our path also the time outside
of the engine in the same call. An engine that answers at once shows the path without any engine's noise; a quick run is
that part only.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import uvloop
from engines import FLAGS as ENGINE_FLAGS
from engines import WITHOUT, Engines, vllm_python
from harness import Incomplete, Row, main, picture_path
from inference_host import OWN_TOKENS, Round, Timing
from inference_ways import Way, bare_way, http_ways, our_way

from prorl_zmq.inference.engine import EngineDescription, Generation
from prorl_zmq.inference.hosting.host import HostOptions
from prorl_zmq.inference.hosting.host_process import run_engine_host
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.wire.messages.jobs import Sampling

SHORT, LONG = 16, 235
"""Lengths of prompts in blocks of 128 tokens: 2k and 30k."""
CONCURRENT = (1, 8, 32)
NEW_TOKENS = 64
LIMIT_MS = 1.0
OURS, TOKEN_API, COMPLETIONS = "ours", "HTTP token API", "HTTP completions"
BARE = "the engine alone"
SETTLE_S = 1.5
"""After this time an engine that worked keeps no core busy."""
CORE = 0
"""That both engines compute on; hosts, server and client have all cores."""
HOST_SCRIPT = Path(__file__).with_name("inference_host.py")
FLAGS = ("--max-model-len=32768", f"--kv-cache-memory-bytes={256 << 20}", "--logprobs-mode=processed_logprobs")

Groups = list[dict[str, Way]]
"""The ways into each engine; those of the first are `BARE` and `OURS`."""
Rates = dict[Round, dict[str, "NDArray[np.float64]"]]
"""Tokens per second of each way in each turn."""


class Null:
    """Implements `Engine`: answers every prompt with one token at once, having made the list that vLLM would want."""

    description = EngineDescription("null", ChatSettings(), 0, 0, 256, "processed_logprobs")
    weight_version = 0

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,  # noqa: ARG002
        stop_token_ids: Sequence[int],  # noqa: ARG002
        job_id: str,  # noqa: ARG002
    ) -> Generation:
        """Answer."""
        last = token_ids.tolist()[-1]
        return Generation(np.array([last], np.int32), np.zeros(1, np.float32), (VersionSpan(0, 0, 1),), "length")

    async def update_weights(self, path: Path, weight_version: int, mode: str) -> None:
        """Do nothing."""

    async def check_health(self) -> None:
        """Be well."""

    async def close(self) -> None:
        """Do nothing."""


def null_host(endpoint: str) -> None:
    """Be a host of the engine that answers at once."""

    async def start() -> Null:
        return Null()

    run_engine_host(start, HostOptions(endpoint=endpoint, backend_broker=f"{endpoint}-nobody", backend_id="null"))


async def null_ms(endpoint: str, calls: int) -> tuple[float, float]:
    """Return how long a call takes through our way if nothing is computed: for a long prompt, and for a short one."""
    process = multiprocessing.get_context("spawn").Process(target=null_host, args=(endpoint,), daemon=True)
    process.start()
    try:
        async with our_way(endpoint) as ours:
            timings = [[await ours(one_token(blocks)) for blocks in (LONG, 0)] for _ in range(calls)]
    finally:
        process.terminate()
        process.join()
    long_s, short_s = np.array([[timing.calls_s[0] for timing in pair] for pair in timings]).T
    return median_ms(long_s), median_ms(short_s)


async def in_turns(engines: Groups, one: Round, times: int, rounds: int = 1) -> dict[str, list[Timing]]:
    """Run a round on each way, so many times.

    Args:
        engines: the ways into each engine.
        one: what to run.
        times: turns of the engines.
        rounds: of each way in a turn, the ways alternating, another one first each time; for `inside_s` to be of the
            same calls it must be even, so that `BARE` is last.
    """
    timings: dict[str, list[Timing]] = {name: [] for ways in engines for name in ways}
    for turn in range(times):
        for ways in engines:
            names = list(ways)
            if len(engines) > 1:
                await asyncio.sleep(SETTLE_S)
                for name in reversed(names):  # awake again; `BARE` last, for it tells of what was before
                    await ways[name](one_token(one.blocks))
            for number in range(rounds):
                first = (turn * rounds + number) % len(names)
                for name in names[first:] + names[:first]:
                    timings[name].append(await ways[name](one))
    return timings


async def warm_up(engines: Groups, lengths: Sequence[int]) -> None:
    """Have each engine compute what its prompts have in common, and run each code once."""
    for ways in engines:
        for way in ways.values():
            for blocks in lengths:
                await way(one_token(blocks))
                await way(Round(blocks, concurrent=4, calls=1, new_tokens=4))


async def overhead_rows(engines: Groups, blocks: int, times: int, rounds: int) -> list[Row]:
    """Measure what each way costs on top of the engine, in calls of one token one at a time."""
    timings = await in_turns(engines, one_token(blocks), times, rounds)
    inside = [seconds for timing in timings[BARE] for seconds in timing.inside_s]
    calls = {name: np.array([timing.calls_s[0] for timing in found]) for name, found in timings.items()}
    alone, ours = calls[BARE], calls[OURS]
    name = f"a {length(blocks)} prompt"
    target = f"under {LIMIT_MS:g} ms" if blocks == LONG else ""
    on_top = median_ms(ours - alone)
    rows = [
        Row(f"{name}, {BARE}", median_ms(alone), "ms"),
        Row(
            f"{name}, {OURS}: on top of the engine",
            on_top,
            "ms",
            f"{BARE}, whole calls",
            median_ms(ours) / median_ms(alone),
            target,
            on_top < LIMIT_MS if target else None,
        ),
        Row(f"{name}, {OURS}: outside of the engine, of each call", median_ms(ours - inside[-len(ours) :]), "ms"),
    ]
    for way in (TOKEN_API, COMPLETIONS):
        whole, base = median_ms(calls[way]), median_ms(alone)
        rows.append(
            Row(f"{name}, {way}: on top of the engine", whole - base, "ms", f"{BARE}, whole calls", whole / base)
        )
    return rows


async def rate_rows(engines: Groups, rounds: Sequence[Round], times: int) -> tuple[list[Row], Rates]:
    """Measure the tokens per second of each way."""
    rows: list[Row] = []
    rates: Rates = {}
    for one in rounds:
        timings = await in_turns(engines, one, times)
        found = {way: np.array([one.generated / timing.seconds for timing in taken]) for way, taken in timings.items()}
        rates[one] = found
        name = f"{one.concurrent} at a time, {length(one.blocks)}"
        for way, rate in found.items():
            ratio = None if way == TOKEN_API else float(np.median(rate / found[TOKEN_API]))
            promised = way == OURS and one.concurrent == CONCURRENT[-1]
            target = "at least the HTTP token API's" if promised else ""
            holds = ratio is not None and ratio >= 1.0 if promised else None
            against = "" if ratio is None else TOKEN_API
            rows.append(Row(f"{name}, {way}", float(np.median(rate)), "tokens/s", against, ratio, target, holds))
    return rows, rates


async def measure_engines(engines: Engines, url: str) -> list[Row]:
    """Measure real engines that have started."""
    endpoint, control = f"ipc://{engines.folder}/ours", engines.folder / "control"
    async with our_way(endpoint) as ours, bare_way(control) as bare:
        near = {BARE: bare, OURS: ours}
        async with http_ways(url) as (token_api, completions):
            both = [near, {TOKEN_API: token_api, COMPLETIONS: completions}]
            await warm_up(both, [SHORT, LONG])
            rows = [row for blocks in (SHORT, LONG) for row in await overhead_rows(both, blocks, 15, 10)]
            rates: Rates = {}
            for blocks, calls, times in ((SHORT, 2, 7), (LONG, 1, 5)):
                rounds = [Round(blocks, concurrent, calls, NEW_TOKENS) for concurrent in CONCURRENT]
                more, found = await rate_rows(both, rounds, times)
                rows += more
                rates |= found
    draw(rates)
    return rows


def one_token(blocks: int) -> Round:
    """Give a round of one call of one new token."""
    return Round(blocks, concurrent=1, calls=1, new_tokens=1)


def length(blocks: int) -> str:
    """Name a length of prompts."""
    return f"{round(Round(blocks, 1, 1, 1).prompt_tokens / 1000)}k"


def median_ms(seconds: NDArray[np.float64]) -> float:
    """Give the median in milliseconds."""
    return 1e3 * float(np.median(seconds))


def measure(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        long_ms, short_ms = uvloop.run(null_ms(f"ipc://{folder}/null", 100 if quick else 500))
    target = f"under {LIMIT_MS:g} ms"
    name = "an engine that answers at once"
    rows = [
        Row(
            f"{name}, a {length(LONG)} prompt",
            long_ms,
            "ms",
            f"{OWN_TOKENS} tokens",
            long_ms / short_ms,
            target,
            long_ms < LIMIT_MS,
        ),
        Row(f"{name}, {OWN_TOKENS} tokens", short_ms, "ms"),
    ]
    if quick:
        return rows
    python = vllm_python()
    if python is None:
        raise Incomplete(WITHOUT, rows)
    with Engines(python) as engines:
        where = (str(engines.model), f"ipc://{engines.folder}/ours", str(engines.folder / "control"))
        flags = (*ENGINE_FLAGS, *FLAGS)
        engines.start("ours", "serves at", "-P", str(HOST_SCRIPT), *where, *flags, core=CORE)
        url = engines.server("http", *FLAGS, core=CORE)
        engines.wait()
        return rows + uvloop.run(measure_engines(engines, url))


def draw(rates: Rates) -> None:
    """Draw the tokens per second by calls at a time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, blocks in zip(panels, (SHORT, LONG), strict=True):
        rounds = [one for one in rates if one.blocks == blocks]
        ways = list(rates[rounds[0]])
        width = 0.8 / len(ways)
        for number, way in enumerate(ways):
            sides = [rates[one][way] for one in rounds]
            low, middle, high = (np.array([np.percentile(side, q) for side in sides]) for q in (10, 50, 90))
            places = np.arange(len(rounds)) + (number - (len(ways) - 1) / 2) * width
            axes.bar(places, middle, width, yerr=np.stack([middle - low, high - middle]), capsize=2, label=way)
        axes.set_xticks(np.arange(len(rounds)), [str(one.concurrent) for one in rounds])
        axes.set(title=f"prompts of {length(blocks)} tokens", xlabel="calls at a time", yscale="log")
        axes.grid(visible=True, axis="y", alpha=0.3)
    panels[0].set_ylabel("new tokens/s (median, p10 to p90)")
    panels[0].legend()
    figure.savefig(picture_path("inference"), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main("inference", "the ways into a vLLM engine: over ZeroMQ, over HTTP, and none", measure)
