"""Sandboxes: time to the first command, to a cell and to the end; 200 at once; compared with bare container commands.

The sides (sandbox_sides.py) take turns, each of ours followed by its bare container command. Sandboxes that the machine
cannot make are left out, and the first row states why. Ours are timed on the real path: a spawner forks an execution
server, that starts the container, and the command goes through its socket. The full run takes about five minutes on two
cores.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from harness import Row, main, picture_path, quantiles
from sandbox_crowd import STARTERS, bare_crowd, crowd_of_ours
from sandbox_sides import DIRECTORY, HOST, find_sides, words_of
from tool_verdicts import adopt_orphans, end_all_below

from prorl_zmq.errors import ProrlError
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sandbox_crowd import Crowd
    from sandbox_sides import Side

    from prorl_zmq.tools.sandbox.sandbox import Sandbox

ROUNDS, QUICK_ROUNDS = 200, 3
AT_ONCE, QUICK_AT_ONCE = 200, 8
SIDE_LIMIT_S = 200.0
"""A side that has used so much takes no more turns; its rows say how many it took."""
LEAST_ROUNDS = 20
LIMIT_S = 60.0
TARGET_CLOSE_MS = 200.0
TARGET_CELL_MS = 50.0
TARGET_MB = 25.0
CROWDED = (HOST, DIRECTORY)
"""What is started 200 times."""
BACKGROUND = "sleep 3600 & (setsid sleep 3600 &); (trap '' INT TERM HUP; sleep 3600) &"
BLUE, GREY, PALE = "#0072B2", "0.6", "#56B4E9"


@dataclass
class Times:
    """What was measured of one side, in seconds."""

    create: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    """From nothing to the end of the first command."""
    bare: list[float] = field(default_factory=list)
    ipython: list[float] = field(default_factory=list)
    cell: list[float] = field(default_factory=list)
    close: list[float] = field(default_factory=list)
    used_s: float = 0.0


async def live_once(side: Side, sandboxes: Sandboxes, name: str, times: Times, *, cells: bool) -> None:
    """Let a sandbox live once, from nothing to nothing."""
    started = time.perf_counter()
    sandbox = await sandboxes.create(name, side.spec)
    try:
        created = time.perf_counter()
        assert (await sandbox.exec(["true"], LIMIT_S)).exit_code == 0
        times.ready.append(time.perf_counter() - started)
        times.create.append(created - started)
        bash = await sandbox.bash()
        await bash.run(BACKGROUND, LIMIT_S)
        if cells:
            sandbox = await first_cell(side, sandboxes, sandbox, times)
    finally:
        started = time.perf_counter()
        await sandbox.close()
        times.close.append(time.perf_counter() - started)


async def first_cell(side: Side, sandboxes: Sandboxes, sandbox: Sandbox, times: Times) -> Sandbox:
    """Start an IPython as INIT does, then run a cell in it as RUN does, which first attaches to the sandbox."""
    started = time.perf_counter()
    cells = await sandbox.ipython(side.python, "require")
    times.ipython.append(time.perf_counter() - started)
    started = time.perf_counter()
    sandbox.release()
    sandbox = await sandboxes.attach(sandbox.handle)
    result = await sandbox.cell_session(cells.number).run("1+1", LIMIT_S)
    times.cell.append(time.perf_counter() - started)
    assert "2" in result.text, result
    return sandbox


def run_bare(side: Side) -> float:
    """Give the seconds of the bare container command."""
    started = time.perf_counter()
    subprocess.run([*side.bare, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.perf_counter() - started


async def take_turns(sides: list[Side], missing: dict[str, str], rounds: int, root: Path) -> dict[str, Times]:
    """Let all sides take turns; those that fail in their first, which is not counted, go over to `missing`."""
    times = {}
    with SandboxesOf(sides, root) as made:
        for side in list(sides):
            try:
                await live_once(side, made[side.name], "first", Times(), cells=True)
                run_bare(side)
            except (ProrlError, subprocess.CalledProcessError) as error:
                words = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error).encode()
                missing[side.name] = words_of(words)
                sides.remove(side)
        times = {side.name: Times() for side in sides}
        for number in range(rounds):
            for side in sides:
                taken = times[side.name]
                if number >= LEAST_ROUNDS and taken.used_s > SIDE_LIMIT_S:
                    continue
                started = time.perf_counter()
                cells = number % side.cells_every == 0
                await live_once(side, made[side.name], f"turn-{number}", taken, cells=cells)
                if side.bare:
                    taken.bare.append(run_bare(side))
                taken.used_s += time.perf_counter() - started
    return times


class SandboxesOf:
    """One `Sandboxes` for each side, all closed at the end."""

    def __init__(self, sides: Sequence[Side], root: Path) -> None:
        self._made = {side.name: Sandboxes(side.kind, root / f"side-{n}") for n, side in enumerate(sides)}

    def __enter__(self) -> dict[str, Sandboxes]:
        return self._made

    def __exit__(self, *_: object) -> None:
        for sandboxes in self._made.values():
            sandboxes.close()


def side_rows(side: Side, times: Times) -> list[Row]:
    ready, ready_95, _ = quantiles(times.ready)
    create, _, _ = quantiles(times.create)
    close, close_95, _ = quantiles(times.close)
    cell, cell_95, _ = quantiles(times.cell)
    limit = side.target_ms
    against, ratio, bare_rows = "", None, []
    if side.bare:
        bare, bare_95, _ = quantiles(times.bare)
        against, ratio = "the bare command", ready / bare
        bare_rows = [
            Row(f"{side.name}: the bare command, `{Path(side.bare[0]).name} … true`", 1e3 * bare, "ms"),
            Row(f"{side.name}: the bare command, p95", 1e3 * bare_95, "ms"),
        ]
    inside = "IPython" if side.cells_every == 1 else f"IPython in every {side.cells_every}th"
    return [
        Row(
            f"{side.name}: sandbox to first command, p50 of {len(times.ready)}",
            1e3 * ready,
            "ms",
            against,
            ratio,
            f"under {limit:g} ms" if limit else "",
            1e3 * ready < limit if limit else None,
        ),
        Row(f"{side.name}: sandbox to first command, p95", 1e3 * ready_95, "ms"),
        Row(f"{side.name}: of that, `create`", 1e3 * create, "ms"),
        *bare_rows,
        Row(
            f"{side.name}: first cell after INIT, p50 of {len(times.cell)}",
            1e3 * cell,
            "ms",
            target=f"under {TARGET_CELL_MS:g} ms",
            holds=1e3 * cell < TARGET_CELL_MS,
        ),
        Row(f"{side.name}: first cell after INIT, p95", 1e3 * cell_95, "ms"),
        Row(f"{side.name}: IPython's start, in INIT", 1e3 * quantiles(times.ipython)[0], "ms"),
        Row(
            f"{side.name}: teardown, bash with jobs and {inside} inside, p50 of {len(times.close)}",
            1e3 * close,
            "ms",
            target=f"under {TARGET_CLOSE_MS:g} ms",
            holds=1e3 * close < TARGET_CLOSE_MS,
        ),
        Row(f"{side.name}: teardown, p95", 1e3 * close_95, "ms"),
    ]


def crowd_rows(name: str, ours: Crowd, bare: Crowd) -> list[Row]:
    whole = f"{name}, {ours.count} at once"
    megabytes = ours.each_bytes / 1e6
    return [
        Row(
            f"{whole}: started with a bash, {STARTERS} at a time",
            ours.starts_per_s,
            "1/s",
            "bare",
            ours.starts_per_s / bare.starts_per_s,
        ),
        Row(f"{whole}: the bare command started", bare.starts_per_s, "1/s"),
        Row(
            f"{whole}: memory each, PSS of all of ours",
            megabytes,
            "MB",
            "bare",
            ours.each_bytes / bare.each_bytes,
            f"under {TARGET_MB:g} MB",
            megabytes < TARGET_MB,
        ),
        Row(f"{whole}: of that, execution server", ours.servers_bytes / 1e6, "MB"),
        Row(f"{whole}: the bare command's memory each", bare.each_bytes / 1e6, "MB"),
        Row(f"{whole}: bash action in one of them, p50", 1e3 * quantiles(ours.action_s)[0], "ms"),
        Row(f"{whole}: CPU each, nothing asked of it", 1e3 * ours.idle, "ms/s"),
        Row(f"{whole}: closed, {STARTERS} at a time", ours.closes_per_s, "1/s"),
        Row(
            f"{whole}: answered, then left nothing behind",
            ours.answered,
            f"of {ours.count}, {len(ours.left)} left",
            target="all, none left",
            holds=ours.answered == ours.count and not ours.left,
        ),
    ]


def draw(times: dict[str, Times], crowds: dict[str, tuple[Crowd, Crowd]]) -> None:
    """Draw the start times of each side, and the memory of the crowds, ours over the bare command's."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.75 * max(3, len(times)) + 1.4), layout="constrained")
    for place, taken in enumerate(times.values()):
        for shift, values, colour in ((-0.18, taken.ready, BLUE), (0.18, taken.bare, GREY)):
            if values:
                p50, p95, _ = quantiles(values)
                left.barh(place + shift, 1e3 * p50, 0.34, color=colour)
                left.plot([1e3 * p50, 1e3 * p95], [place + shift] * 2, color="black", linewidth=1)
                left.text(1e3 * p95, place + shift, f"  {1e3 * p50:.3g}", va="center", fontsize=8)
    left.set_yticks(range(len(times)), list(times))
    left.invert_yaxis()
    left.margins(x=0.12)
    left.set_xlabel("milliseconds to a first command's end (p50; line: to p95)")
    left.legend(handles=[plt.Rectangle((0, 0), 1, 1, color=c) for c in (BLUE, GREY)], labels=["ours", "bare command"])
    for place, (ours, bare) in enumerate(crowds.values()):
        rest = (ours.each_bytes - ours.servers_bytes) / 1e6
        servers = right.barh(place - 0.18, ours.servers_bytes / 1e6, 0.34, color=BLUE)
        others = right.barh(place - 0.18, rest, 0.34, left=ours.servers_bytes / 1e6, color=PALE)
        bares = right.barh(place + 0.18, bare.each_bytes / 1e6, 0.34, color=GREY)
        for shift, value in ((-0.18, ours.each_bytes), (0.18, bare.each_bytes)):
            right.text(value / 1e6, place + shift, f"  {value / 1e6:.3g}", va="center", fontsize=8)
        right.legend(
            [servers, others, bares], ["execution server", "runtime and shells", "bare command"], loc="upper right"
        )
    right.axvline(TARGET_MB, color="black", linestyle=":", linewidth=1)
    right.set_yticks(range(len(crowds)), [f"{name},\n{ours.count} at once" for name, (ours, _) in crowds.items()])
    right.invert_yaxis()
    right.set_xlabel(f"MB of memory each, PSS (target: {TARGET_MB:g})")
    figure.savefig(picture_path("sandbox"), dpi=120)


def measure(quick: bool) -> list[Row]:
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        root = Path(folder)
        try:
            sides, missing = find_sides(root, build=not quick)
            possible = len(sides) + len(missing)
            times = uvloop.run(take_turns(sides, missing, QUICK_ROUNDS if quick else ROUNDS, root))
            crowds = {}
            for side in sides:
                if side.name in CROWDED:
                    count = QUICK_AT_ONCE if quick else AT_ONCE
                    ours = uvloop.run(crowd_of_ours(side, count, root / f"crowd-{len(crowds)}"))
                    crowds[side.name] = ours, uvloop.run(bare_crowd(side, count))
                    end_all_below()
        finally:
            end_all_below()
    if not quick:
        draw(times, crowds)
    why = "; ".join(f"without {name}: {problem}" for name, problem in missing.items())
    rows = [Row("kinds of sandbox that this machine can make", len(sides), f"of {possible}" + f" ({why})" * bool(why))]
    for side in sides:
        rows += side_rows(side, times[side.name])
    for name, (ours, bare) in crowds.items():
        rows += crowd_rows(name, ours, bare)
    return rows


if __name__ == "__main__":
    main("sandbox", "start, memory and end of sandboxes, beside the bare container commands", measure)
