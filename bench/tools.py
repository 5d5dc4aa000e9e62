"""Tool calls: an agent's bash action and IPython cell, ours compared with peers, and the share of right answers.

Bash: the same mixed list of actions through every approach of tool_peers.py, in turns, each of them warm, in one clean
environment: the peers and the first of ours in plain processes on the host, the others of ours in containers; and the
cases of tool_cases.py, judged by tool_verdicts.py. IPython: `1+1` through ours, and through a kernel of ipykernel's by
jupyter_client, over tcp (its default) and ipc. Ours uses its execution server in both. The full run takes about six
minutes, most of which the peers sleep.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import uvloop
from harness import RESULTS, Row, main, picture_path, quantiles
from sandbox_sides import host_spec, root_filesystem
from tool_cases import CASES
from tool_peers import APPROACHES, APPTAINER, BUBBLEWRAP, PROCESS, problem_with_approach
from tool_verdicts import ENVIRONMENT, RIGHT, SAID, WRONG, Verdict, adopt_orphans, end_all_below, judge

from prorl_zmq.tools.containers.kinds import problem_with
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from tool_peers import Approach

    from prorl_zmq.wire.messages.jobs import SandboxKind

OURS = (PROCESS, BUBBLEWRAP, APPTAINER)
BARE, BASH, TMUX, SWE_REX = "bare ptyprocess", "bash -c", "OpenHands' tmux loop", "SWE-ReX LocalRuntime"
SLOW = (TMUX, SWE_REX)
"""They take one turn where the others take `FAST_TURNS`."""
FAST_TURNS = 4
ACTION_LIMIT_S = 60.0
SET_UP = (
    "mkdir -p tree/a tree/b && for i in {1..8}; do seq $i 200 > tree/a/$i.txt; seq 300 > tree/b/$i.txt; done && "
    "if command -v git >/dev/null; then git init -q . && git add tree; fi"
)
ACTIONS = {
    "true": "true",
    "echo": "echo hello world",
    "cd, pwd": "cd tree && pwd && cd ..",
    "export, use": "export A=$((A+1)); echo $A",
    "ls -l": "ls -l tree/a",
    "grep -r": "grep -rn 199 tree",
    "python3 -c": "python3 -c 'print(6*7)'",
    "here-document": "cat > note.txt <<'X'\nfirst line\nsecond \"line\"\nX",
    "pipeline, exit 3": "seq 500 | sort -r | head -n 3; (exit 3)",
    "loop": "for i in 1 2 3 4 5 6 7 8 9; do echo item $i; done",
    "100 kB of output": "seq 10000 26666",
    "1 MB of output": "seq 100000 242857",
    "git status": "git status --short | head -n 3",
}
TARGET_MS = 3.0
TARGET_BARE = 2.0
TARGET_TMUX = 200.0
TARGET_SWE_REX = 40.0
TARGET_CELL_MS = 3.0
TARGET_KERNEL = 4.0
CELL_BATCH = 20
KERNELS = {"tcp": "ipykernel, jupyter_client over tcp", "ipc": "ipykernel, jupyter_client over ipc"}
COLOURS = {RIGHT: "#0072B2", SAID: "#E6E6E6", WRONG: "#D55E00"}
"""Blue, light grey and vermilion of Okabe and Ito: apart for the colour-blind, and in grey as well."""
MARKS = {RIGHT: "", SAID: "–", WRONG: "×"}
MEANINGS = {RIGHT: "right", SAID: "refused or gave up, and said so", WRONG: "wrong, without an error"}

JUDGES = 4
"""Approaches that are judged at one time."""

Seconds = dict[str, dict[str, list[float]]]
"""By approach and kind of action."""


async def act(approach: Approach, actions: dict[str, str], *, exact: bool) -> dict[str, float]:
    """Give the seconds of each action."""
    seconds = {}
    for kind, command in actions.items():
        started = time.perf_counter()
        answer = await approach.run(command, ACTION_LIMIT_S)
        seconds[kind] = time.perf_counter() - started
        expected = 3 if kind == "pipeline, exit 3" else 0
        assert not exact or answer.exit_code == expected, f"{kind}: {answer.exit_code}, {answer.output[:200]!r}"
    return seconds


async def act_all(names: Sequence[str], rounds: int, root: Path) -> Seconds:
    """Let approaches take turns with the whole list; where there is no git, without that."""
    seconds: Seconds = {}
    async with AsyncExitStack() as stack:
        approaches = {}
        for name in names:
            folder = root / f"approach-{len(approaches)}"
            folder.mkdir()
            os.environ["HOME"] = str(folder)
            approaches[name] = APPROACHES[name]()
            await approaches[name].start(folder)
            stack.push_async_callback(approaches[name].close)
            await approaches[name].run(SET_UP, ACTION_LIMIT_S)
            git = b"git" in (await approaches[name].run("command -v git", ACTION_LIMIT_S)).output
            seconds[name] = {kind: [] for kind in ACTIONS if git or kind != "git status"}
        for _ in range(rounds):
            for name, approach in approaches.items():
                exact = name in (*OURS, BARE)
                if name not in SLOW:
                    await act(approach, {"true": "true"}, exact=exact)  # the others have had the caches
                for _ in range(1 if name in SLOW else FAST_TURNS):
                    actions = {kind: ACTIONS[kind] for kind in seconds[name]}
                    for kind, taken in (await act(approach, actions, exact=exact)).items():
                        seconds[name][kind].append(taken)
    return seconds


@contextmanager
def kernel(transport: str, folder: Path) -> Iterator[Callable[[], Awaitable[None]]]:
    """Start a kernel of ipykernel's; gives what runs a cell in it and sees its result."""
    from jupyter_client.manager import KernelManager

    options = {"transport": "ipc", "ip": str(folder / "kernel")} if transport == "ipc" else {}
    manager = KernelManager(connection_file=str(folder / f"{transport}.json"), **options)
    manager.start_kernel(stdout=2)
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=ACTION_LIMIT_S)

        async def run() -> None:
            results = []
            client.execute_interactive(  # blocks the loop: nothing else runs meanwhile
                "1+1",
                timeout=ACTION_LIMIT_S,
                output_hook=lambda message: results.append(message["content"].get("data", {}).get("text/plain")),
            )
            assert "2" in results

        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


async def own_cells(kind: SandboxKind, folder: Path, stack: AsyncExitStack) -> Callable[[], Awaitable[None]]:
    """Start an IPython of ours; gives what runs a cell in it and sees its result."""
    sandboxes = Sandboxes(kind, folder / kind)
    stack.callback(sandboxes.close)
    sandbox = await sandboxes.create("cells", SandboxSpec() if kind == "process" else host_spec())
    stack.push_async_callback(sandbox.close)
    session = await sandbox.ipython(sys.executable, "require")

    async def run() -> None:
        assert "2" in (await session.run("1+1", ACTION_LIMIT_S)).text

    return run


async def cells(batches: int) -> dict[str, list[float]]:
    """Let ours and the kernels take turns with `1+1`; gives the seconds of each cell."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-bench-")))
        runs = {PROCESS: await own_cells("process", folder, stack)}
        if problem_with("bubblewrap") is None:
            runs[BUBBLEWRAP] = await own_cells("bubblewrap", folder, stack)
        for transport, name in KERNELS.items():
            runs[name] = stack.enter_context(kernel(transport, folder))
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(batches):
            for name, run in runs.items():
                await run()
                for _ in range(CELL_BATCH):
                    started = time.perf_counter()
                    await run()
                    seconds[name].append(time.perf_counter() - started)
    return seconds


def draw_speed(seconds: Seconds) -> None:
    """Draw the median time of each kind of action, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    styles = {PROCESS: ("o", "#0072B2"), BUBBLEWRAP: ("s", "#56B4E9"), APPTAINER: ("P", "#009E73")}
    styles |= {BARE: ("|", "black"), BASH: ("^", "0.5"), TMUX: ("D", "#D55E00"), SWE_REX: ("v", "#CC79A7")}
    for name, kinds in seconds.items():
        marker, colour = styles[name]
        medians = [1e3 * float(np.median(times)) for times in kinds.values()]
        p50 = 1e3 * quantiles(all_of(kinds))[0]
        axes.plot(
            medians,
            list(kinds),
            marker,
            color=colour,
            markersize=10 if marker == "|" else 7,
            label=f"{name}: {p50:.3g} ms",
        )
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9")
    axes.set_xlabel("milliseconds for an action (median of each kind)")
    axes.legend(title="p50 of the whole list", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(picture_path("tools"), dpi=120)


def draw_correctness(verdicts: list[Verdict]) -> None:
    """Draw the grid of cases and approaches."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    names, cases = list(dict.fromkeys(each.approach for each in verdicts)), [case.name for case in CASES]
    counts = {name: Counter(each.verdict for each in verdicts if each.approach == name) for name in names}
    figure, axes = plt.subplots(figsize=(8.5, 0.2 * len(cases) + 1.8), layout="constrained")
    for each in verdicts:
        x, y = names.index(each.approach), cases.index(each.case)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=COLOURS[each.verdict], edgecolor="white"))
        axes.text(x + 0.5, y + 0.5, MARKS[each.verdict], ha="center", va="center", fontsize=9)
    axes.set_xlim(0, len(names))
    axes.set_ylim(len(cases), 0)
    axes.set_yticks([y + 0.5 for y in range(len(cases))], cases, fontsize=7.5)
    labels = []
    for name in names:
        title = name if len(name) < 10 else name.replace(" ", "\n", 1)
        labels.append(f"{title}\n{counts[name][RIGHT]} right\n{counts[name][WRONG]} wrong")
    axes.set_xticks([x + 0.5 for x in range(len(names))], labels, fontsize=7.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    patches = [
        Patch(color=COLOURS[verdict], label=f"{MARKS[verdict]} {meaning}") for verdict, meaning in MEANINGS.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(picture_path("tools_correctness"), dpi=120)


def all_of(kinds: dict[str, list[float]]) -> list[float]:
    """Give the seconds of all actions of an approach."""
    return [taken for times in kinds.values() for taken in times]


def speed_rows(seconds: Seconds) -> list[Row]:
    p50, p95 = {}, {}
    for name, kinds in seconds.items():
        p50[name], p95[name], _ = quantiles(all_of(kinds))
    count = len(all_of(seconds[PROCESS]))
    own = 1e3 * p50[PROCESS]
    over_bare = p50[PROCESS] / p50[BARE]
    others = [name for name in (TMUX, SWE_REX, BASH, BARE, BUBBLEWRAP, APPTAINER) if name in seconds]
    what = f"bash action of a mixed list, p50 of {count:,}"
    rows = [
        Row(what, own, "ms", target=f"under {TARGET_MS:g} ms", holds=own < TARGET_MS),
        Row(what, own, "ms", BARE, over_bare, f"under {TARGET_BARE:g}×", over_bare < TARGET_BARE),
    ]
    for name in others:
        ratio = p50[name] / p50[PROCESS]
        least = {TMUX: TARGET_TMUX, SWE_REX: TARGET_SWE_REX}.get(name)
        label = f"{name} (written from its documented 0.5 s poll)" if name == TMUX else name
        target, holds = (f"ours at least {least:g}× faster", ratio >= least) if least else ("", None)
        actions = len(all_of(seconds[name]))
        rows.append(Row(f"{label}, p50 of {actions:,}", 1e3 * p50[name], "ms", "ours", ratio, target, holds))
    rows.append(Row("bash action, p95", 1e3 * p95[PROCESS], "ms", BARE, p95[PROCESS] / p95[BARE]))
    return rows + [Row(f"{name}, p95", 1e3 * p95[name], "ms", "ours", p95[name] / p95[PROCESS]) for name in others]


def verdict_rows(verdicts: list[Verdict]) -> list[Row]:
    rows = []
    for name in dict.fromkeys(each.approach for each in verdicts):
        counts = Counter(each.verdict for each in verdicts if each.approach == name)
        unit = f"right of {counts.total()}, {counts[SAID]} refused, {counts[WRONG]} wrong"
        own = name in OURS
        rows.append(
            Row(
                f"correctness, {name}",
                counts[RIGHT],
                unit,
                target="none wrong" if own else "",
                holds=not counts[WRONG] if own else None,
            )
        )
    return rows


def cell_rows(seconds: dict[str, list[float]]) -> list[Row]:
    rows = []
    own, _, _ = quantiles(seconds[PROCESS])
    for name, times in seconds.items():
        p50, p95, _ = quantiles(times)
        what = f"1+1, {name}, p50 of {len(times)}"
        if name == PROCESS:
            rows.append(
                Row(what, 1e3 * p50, "ms", target=f"under {TARGET_CELL_MS:g} ms", holds=1e3 * p50 < TARGET_CELL_MS)
            )
        else:
            peer, ratio = name in KERNELS.values(), p50 / own
            target, holds = (f"ours at least {TARGET_KERNEL:g}× faster", ratio >= TARGET_KERNEL) if peer else ("", None)
            rows.append(Row(what, 1e3 * p50, "ms", "ours", ratio, target, holds))
        rows.append(Row(f"1+1, {name}, p95", 1e3 * p95, "ms"))
    return rows


@contextmanager
def commands_environment() -> Iterator[Path]:
    """Give a folder, and this process the environment of commands; at the end nothing that was started is left."""
    before = dict(os.environ)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        os.environ |= ENVIRONMENT
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ |= before
            end_all_below()


def judge_every(name: str, step: int) -> list[Verdict]:
    """Give the verdicts on an approach in every so many cases."""
    return judge(name, CASES[::step])


def judge_all(names: Sequence[str], *, quick: bool) -> list[Verdict]:
    """Give the verdicts, `JUDGES` approaches at a time, each in a process of its own: mostly they sleep."""
    order = names[::-1]  # the slowest first
    steps = [1 if not quick else 5 if name == PROCESS else 20 for name in order]
    with ProcessPoolExecutor(JUDGES, mp_context=get_context("spawn")) as judges:
        verdicts = dict(zip(order, judges.map(judge_every, order, steps), strict=True))
    return [verdict for name in names for verdict in verdicts[name]]


def measure(quick: bool) -> list[Row]:
    root_filesystem(build=not quick)
    missing = {name: problem for name in APPROACHES if (problem := problem_with_approach(name))}
    names = [name for name in APPROACHES if name not in missing]
    with commands_environment() as folder:
        seconds = uvloop.run(act_all(names, 1 if quick else 16, folder))
    cell_seconds = uvloop.run(cells(batches=1 if quick else 10))
    verdicts = judge_all(names, quick=quick)
    if not quick:
        draw_speed(seconds)
        draw_correctness(verdicts)
        table = [
            {"approach": each.approach, "case": each.case, "verdict": each.verdict, "what": each.what}
            for each in verdicts
        ]
        (RESULTS / "tools_correctness.json").write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    why = "; ".join(f"without {name}: {problem}" for name, problem in missing.items())
    taken = Row("approaches taken", len(names), f"of {len(APPROACHES)}" + f" ({why})" * bool(why))
    return [taken, *speed_rows(seconds), *cell_rows(cell_seconds), *verdict_rows(verdicts)]


if __name__ == "__main__":
    main("tools", "bash actions and IPython cells, ours and peers, and who answers rightly", measure)
