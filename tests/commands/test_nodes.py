"""How nodes look in a terminal."""

from __future__ import annotations

import io

from msgspec.structs import replace
from rich.console import Console

from prorl_zmq.commands.nodes import Seen, layout
from prorl_zmq.service.node_rows import NodeRow
from prorl_zmq.wire.messages.jobs import Outcome, Phase
from prorl_zmq.wire.messages.nodes import LostNode, NodeFacts

FACTS = NodeFacts(
    host="h1",
    allocation="17_1",
    version="1.0",
    images=("tools.sif", "web.sif"),
    sandboxes=12,
    memory_free_bytes=3 * 2**30,
    memory_total_bytes=8 * 2**30,
)
ROW = NodeRow(
    node="h1-17_1",
    host="h1",
    allocation="17_1",
    state="ready",
    slots={Phase.INIT: 8, Phase.RUN: 64, Phase.EVAL: 8},
    used={Phase.RUN: 20},
    held=20,
    silent_s=0.42,
    facts=FACTS,
)
LOST = LostNode(
    node="h2-17_2", host="h2", died=True, ago_s=8.746, jobs=9, completed={"a": 2, "b": 3}, ended={Outcome.TIMEOUT: 1}
)


def shown(seen: Seen, *, details: bool = False, width: int = 80) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=width).print(layout(seen, details=details))
    return [" ".join(line.replace("│", " ").split()) for line in screen.getvalue().splitlines()]


def test_a_node_is_one_row() -> None:
    lines = shown(Seen([ROW], [], []))
    assert "h1-17_1 h1 ready 0/8 20/64 0/8 20 0.4 s" in lines
    assert not any("slurm" in line for line in lines)


def test_slurm_has_a_column_in_the_same_table() -> None:
    waits = NodeRow(slurm_job="17_2", slurm_state="pending (Resources)", left_s=3600.0)
    seen = Seen([replace(ROW, slurm_job="17_1", slurm_state="running", left_s=90.0), waits], [], [], on_slurm=True)
    lines = shown(seen, width=160)
    assert "h1-17_1 h1 ready 0/8 20/64 0/8 20 0.4 s 17_1 running 1 min 30 s" in lines
    assert "17_2 pending (Resources) 1 h 0 min" in lines


def test_a_lost_node_is_told_with_where_its_jobs_went() -> None:
    lines = shown(Seen([ROW], [LOST, replace(LOST, died=False, jobs=0, is_back=True)], []), width=200)
    assert lines[-2] == (
        "h2-17_2 was lost 8.7 s ago (its connection ended) with 9 jobs: 5 have completed (2 on a, 3 on b), "
        "1 ended as timeout, 3 continue elsewhere"
    )
    assert lines[-1] == "h2-17_2 was lost 8.7 s ago (it fell silent) without jobs; it is back"


def test_details_and_another_version() -> None:
    other = replace(ROW, node="old", facts=replace(FACTS, version="0.9", memory_total_bytes=0, images=()))
    lines = shown(Seen([ROW, replace(ROW, node="h3"), other], [], ["rollout-1 does not answer: no"]), details=True)
    text = "\n".join(lines)
    assert "h1-17_1 17_1 tools.sif 12 3.0 of 8.0 GiB – 1.0" in text
    assert "old 17_1 – 12 – – 0.9" in text
    assert "most nodes have prorl-zmq 1.0, and not old (0.9): install one version everywhere" in " ".join(lines)
    assert "rollout-1 does not answer: no" in text


def test_it_fits_a_terminal_of_80_columns() -> None:
    row = replace(ROW, node="n" * 100, host="h" * 60, state="lost", said_by=("rollout-0",))
    screen = io.StringIO()
    Console(file=screen, width=80).print(layout(Seen([row], [LOST], [], on_slurm=True), details=True))
    assert max(map(len, screen.getvalue().splitlines())) <= 80
