"""The cost of the model proxy: 256 conversations at once through it, on an engine that answers at once.

The proxy is one process with 256 rollouts, a server and a captured conversation each, as RUN processes have them. The
peer is rllm-model-gateway with its fastest settings: uvloop, httptools, one worker, and its store in memory, where it
keeps whole requests and replies. Both get the same requests of 21 to 43 kB in the same turns, and both keep each call's
exact tokens: ours encodes the new messages and asks the engine host over ZeroMQ; the peer forwards the request over
HTTP, and stores the upstream's answer. A bare aiohttp server gets the same requests too, and always returns the same
answer: the least cost of any proxy built on it.

Requests per second and core are calls per CPU second of the proxy's process, which has its own core: clients, engine
host and upstream have the others, and are not counted. The added latency of a call is its time through the proxy less
that of the same prompts straight to the engine host over ZeroMQ; for the peer, straight to its upstream. All 256
conversations are open all the time. With several calls under way, each waits for earlier ones. Latencies are those of
the quietest round.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import uvloop
import zmq
from gateway_conversations import TURNS, Call, Calls, Conversation, HttpClient, conversations, run
from gateway_sides import (
    BARE,
    CORES,
    OTHER_CORES,
    PEER,
    START_S,
    OurSide,
    PeerSide,
    Usage,
    bare_side,
    our_side,
    peer_python,
    peer_side,
)
from harness import Incomplete, Row, main, picture_path

from prorl_zmq import Sampling
from prorl_zmq.inference.client import EngineClient
from prorl_zmq.wire.messages.backends import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]

COUNT, QUICK_COUNT, WARM_UP_COUNT = 256, 64, 16
"""Conversations."""
BUSY, IDLE = 16, 1
"""Calls under way, if not of all conversations."""
ROUNDS = 3
TARGET = 2.0
BARE_TARGET = 0.1
"""Of the bare server's calls per second and core."""
OURS = "prorl_zmq"


class Way(NamedTuple):
    """How the conversations are led."""

    at_once: int
    """Calls under way."""
    stream: bool = False

    def __str__(self) -> str:
        return f"{self.at_once} under way" + (", streamed" if self.stream else "")


class Side:
    """What was measured of one proxy, and of the way to its engine without it.

    Args:
        count: conversations.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.ways = (Way(count), Way(count, stream=True), Way(BUSY), Way(IDLE))
        self.cpu_s: dict[Way, list[float]] = defaultdict(list)
        """Per call, by round."""
        self.calls: dict[Way, list[Seconds]] = defaultdict(list)
        """By round."""
        self.direct: dict[int, list[Seconds]] = defaultdict(list)
        """By calls under way and round."""
        self.conversation_bytes = 0.0

    async def measure(self, pid: int, way: Way, urls: Sequence[str], prompt_tokens: NDArray[np.int64] | None) -> Calls:
        """Run all conversations once."""
        client = HttpClient(urls, prompt_tokens, stream=way.stream)
        made = conversations(len(urls))
        async with client.session:
            before = Usage.of(pid)
            calls = await run(made, way.at_once, client.ask)
            after = Usage.of(pid)
        self.cpu_s[way].append((after.cpu_s - before.cpu_s) / (len(urls) * TURNS))
        self.calls[way].append(seconds_of(calls))
        return calls

    def note_memory(self, before: Usage, after: Usage) -> None:
        """Note what the first round's conversations take; later ones find room that was freed."""
        grown = after.resident_bytes - before.resident_bytes
        self.conversation_bytes = self.conversation_bytes or grown / self.count

    def rate(self, way: Way) -> float:
        """Return calls per second and core: the median of the rounds."""
        return 1 / float(np.median(self.cpu_s[way]))

    def added_ms(self, at_once: int, percentile: float) -> tuple[float, float]:
        """Return what a call takes longer than without the proxy, and how many times as long it takes."""
        through, direct = (
            1e3 * float(np.percentile(quietest(rounds), percentile))
            for rounds in (self.calls[Way(at_once)], self.direct[at_once])
        )
        return max(0.0, through - direct), through / direct


def seconds_of(calls: Calls) -> Seconds:
    """Return the time of each call, the shortest first."""
    return np.sort([call.seconds for turns in calls for call in turns])


def quietest(rounds: Sequence[Seconds]) -> Seconds:
    """Return the round that the machine's other work disturbed least."""
    return min(rounds, key=lambda seconds: float(np.percentile(seconds, 99)))


async def straight_to_host(endpoint: str, prompt_tokens: NDArray[np.int64], at_once: int) -> Seconds:
    """Ask the engine host itself for prompts of so many tokens, by conversation and turn."""
    backend = Backend(backend_id="bench", endpoint=endpoint)
    ids = np.arange(int(prompt_tokens.max()), dtype=np.int32)
    with zmq.Context() as context:
        client = EngineClient(context, reconnect_s=START_S)
        await client.health(endpoint, START_S)

        async def ask(conversation: Conversation, turn: int) -> Call:
            prompt = ids[: prompt_tokens[conversation.number, turn]]
            started = time.perf_counter()
            await client.generate(backend, "job", prompt, Sampling(max_tokens=512), ())
            return Call(time.perf_counter() - started, len(prompt))

        calls = await run(conversations(len(prompt_tokens)), at_once, ask)
        client.close()
    return seconds_of(calls)


async def straight_to_upstream(upstream: str, prompt_tokens: NDArray[np.int64], at_once: int) -> Seconds:
    """Send the peer's upstream what the peer is sent."""
    client = HttpClient([upstream] * len(prompt_tokens), prompt_tokens, stream=False)
    async with client.session:
        calls = await run(conversations(len(prompt_tokens)), at_once, client.ask)
    return seconds_of(calls)


async def ours_once(ours: OurSide, side: Side, way: Way, captured: Counter[str]) -> NDArray[np.int64]:
    """Run all conversations through our proxy; gives the tokens of their prompts by conversation and turn."""
    before = Usage.of(ours.pid)
    with ours.open(side.count, captured) as urls:
        calls = await side.measure(ours.pid, way, urls, None)
        side.note_memory(before, Usage.of(ours.pid))
    return np.array([[call.prompt_tokens for call in turns] for turns in calls])


async def peer_once(peer: PeerSide, side: Side, way: Way, prompt_tokens: NDArray[np.int64]) -> None:
    """Run all conversations through the peer."""
    before = Usage.of(peer.pid)
    with peer.open(side.count) as urls:
        await side.measure(peer.pid, way, urls, prompt_tokens)
        side.note_memory(before, Usage.of(peer.pid))


async def measure_all(
    ours: OurSide,
    endpoint: str,
    peer: PeerSide | None,
    bare: tuple[int, str],
    count: int,
    rounds: int,
    captured: Counter[str],
) -> tuple[dict[str, Side], Side]:
    """Let all sides take turns; gives ours and the peer's, and the bare server's."""
    bare_pid, bare_url = bare
    bare_one = Side(count)
    warm_up = Side(WARM_UP_COUNT)
    for way in warm_up.ways[:2]:
        prompt_tokens = await ours_once(ours, warm_up, way, captured)
        if peer is not None:
            await peer_once(peer, warm_up, way, prompt_tokens)
    sides = {OURS: Side(count)} | ({PEER: Side(count)} if peer is not None else {})
    for way in sides[OURS].ways * rounds:
        prompt_tokens = await ours_once(ours, sides[OURS], way, captured)
        if peer is not None:
            await peer_once(peer, sides[PEER], way, prompt_tokens)
        if way == Way(count):
            await bare_one.measure(bare_pid, way, [bare_url] * count, prompt_tokens)
        if way.stream:
            continue
        sides[OURS].direct[way.at_once].append(await straight_to_host(endpoint, prompt_tokens, way.at_once))
        if peer is not None:
            direct = await straight_to_upstream(peer.upstream, prompt_tokens, way.at_once)
            sides[PEER].direct[way.at_once].append(direct)
    return sides, bare_one


def rate_rows(sides: dict[str, Side]) -> list[Row]:
    """Give the calls per second and core."""
    rows = []
    for way in sides[OURS].ways:
        for who, side in sides.items():
            name, rate = f"{who}, {way}: calls per second and core", side.rate(way)
            if who == PEER or PEER not in sides:
                rows.append(Row(name, rate, "calls/s"))
            else:
                ratio = rate / sides[PEER].rate(way)
                promised = way.at_once == side.count
                target, holds = (f"at least {TARGET:g}×", ratio >= TARGET) if promised else ("", None)
                rows.append(Row(name, rate, "calls/s", PEER, ratio, target, holds))
    return rows


def bare_rows(ours: Side, bare: Side) -> list[Row]:
    """Compare our calls with those of a server that does nothing."""
    way = Way(ours.count)
    rate, bare_rate = ours.rate(way), bare.rate(way)
    name, target = f"{OURS}, {way}, beside a bare server: calls per second and core", f"at least {BARE_TARGET:g} of it"
    return [
        Row(name, rate, "calls/s", BARE, rate / bare_rate, target, rate / bare_rate >= BARE_TARGET),
        Row(f"{BARE}, {way}: calls per second and core", bare_rate, "calls/s"),
    ]


def latency_rows(sides: dict[str, Side]) -> list[Row]:
    """Give what calls take longer."""
    rows = []
    straight = {OURS: "straight to the engine host", PEER: "straight to its upstream"}
    for at_once in (IDLE, BUSY, sides[OURS].count):
        for who, side in sides.items():
            for percentile in (50, 99):
                added, ratio = side.added_ms(at_once, percentile)
                name = f"{who}, {at_once} under way: added latency p{percentile}"
                rows.append(Row(name, added, "ms", f"{straight[who]}, whole calls", ratio))
    return rows


def memory_rows(sides: dict[str, Side]) -> list[Row]:
    """Give the memory of an open conversation."""
    rows = []
    for who, side in sides.items():
        ratio = side.conversation_bytes / sides[PEER].conversation_bytes if who == OURS and PEER in sides else None
        name = f"{who}: memory per open conversation, after {TURNS} turns"
        rows.append(Row(name, side.conversation_bytes / 1024, "KiB", PEER if ratio else "", ratio))
    return rows


def measure(quick: bool) -> list[Row]:
    captured: Counter[str] = Counter()
    problem = ""
    try:
        python = peer_python()
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{PEER} cannot be installed here: {error}"
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder, ExitStack() as stack:
        ours, endpoint = stack.enter_context(our_side(folder))
        peer = None if problem else stack.enter_context(peer_side(python))
        os.sched_setaffinity(0, OTHER_CORES)
        stack.callback(os.sched_setaffinity, 0, CORES)
        count, rounds = (QUICK_COUNT, 1) if quick else (COUNT, ROUNDS)
        bare = stack.enter_context(bare_side())
        sides, bare_one = uvloop.run(measure_all(ours, endpoint, peer, bare, count, rounds, captured))
    rows = [
        *rate_rows(sides),
        *bare_rows(sides[OURS], bare_one),
        *latency_rows(sides),
        *memory_rows(sides),
        Row(
            f"{OURS}: generated tokens in the trajectories",
            100 * captured["tokens"] / captured["generated"],
            "%",
            target="all",
            holds=captured["tokens"] == captured["generated"],
        ),
    ]
    if problem:
        raise Incomplete(problem, rows)
    if not quick:
        draw(sides)
    return rows


def draw(sides: dict[str, Side]) -> None:
    """Draw the CPU time of a call, and how latencies are spread."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (bars, spread) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    colors = {OURS: "tab:blue", PEER: "0.6"}
    ways = sides[OURS].ways
    for place, (who, side) in enumerate(sides.items()):
        heights = [1e3 / side.rate(way) for way in ways]
        drawn = bars.bar(np.arange(len(ways)) + 0.4 * place, heights, 0.38, label=who, color=colors[who])
        bars.bar_label(drawn, [f"{height:.2g}" for height in heights])
        for rounds, style, words in ((side.calls[Way(BUSY)], "-", ""), (side.direct[BUSY], ":", ", without it")):
            seconds = quietest(rounds)
            shares = 1 - np.arange(len(seconds)) / len(seconds)
            spread.plot(1e3 * seconds, shares, style, color=colors[who], label=f"{who}{words}")
    bars.set_xticks(np.arange(len(ways)) + 0.2, [str(way).replace(", ", "\n") for way in ways])
    bars.set_ylabel("CPU milliseconds of a call")
    bars.legend()
    spread.set(xscale="log", yscale="log", xlabel=f"milliseconds, {BUSY} of {COUNT} conversations under way")
    spread.set_ylabel("share of calls that take longer")
    spread.legend()
    figure.savefig(picture_path("gateway"), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(
        "gateway", f"{COUNT} conversations at once through the model proxy, on an engine that answers at once", measure
    )
