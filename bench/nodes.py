"""Many nodes: the rollout broker's cost per node, the losses with one, and the growth of throughput.

`--part` picks some of five parts; a quick run has three. `crowd` and `jobs` have emulated nodes (node_fleet.py), which
cost less than the one real rollout broker, so that the broker is measured: its CPU for a node and for a job, while it
is stopped, and with many jobs held. `growth`, `loss` and `drain` have real `prorl node`s, each on its own host with
keys (tests/namespace_hosts.py; it needs root): the speed-up from 1 to 8, the seconds from a node's death to its jobs'
next start, and the cost of a drain.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from harness import Incomplete, Row, command, report
from node_crowd import crowd_rows, job_rows
from node_growth import growth_rows
from node_losses import drain_rows, loss_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = {"crowd": crowd_rows, "jobs": job_rows, "growth": growth_rows, "loss": loss_rows, "drain": drain_rows}
WITH_HOSTS = {"growth", "loss", "drain"}
QUICK = ("crowd", "jobs", "drain")
"""The parts of a quick run that names none."""


def measure(parts: Sequence[str], quick: bool) -> list[Row]:
    possible = [part for part in parts if part not in WITH_HOSTS or os.geteuid() == 0]
    rows = [row for part in possible for row in PARTS[part](quick)]
    if left_out := PARTS.keys() - possible:
        why = "" if os.geteuid() == 0 else "; real nodes' hosts want root"
        raise Incomplete(f"it did without {', '.join(sorted(left_out))}{why}", rows)
    return rows


if __name__ == "__main__":
    about = "what a node and its jobs cost the broker, what is lost with a node, and the speed-up by nodes"
    parser = command("nodes", about)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated")
    arguments = parser.parse_args()
    chosen = arguments.part or (QUICK if arguments.quick else tuple(PARTS))
    report("nodes", about, arguments, partial(measure, chosen, arguments.quick))
