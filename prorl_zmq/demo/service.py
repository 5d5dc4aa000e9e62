"""A trainer's own service: a child process in a run folder of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..service.child import ChildService

if TYPE_CHECKING:
    from pathlib import Path

TOPOLOGY = """\
backends = [{backends}]

[rollout_broker]
ready_limit = {ready_limit}
journal = "{journal}"

[sandbox]
kind = "{sandbox}"

[[stage]]
role = "init"
slots = 4

[[stage]]
role = "run"
slots = {slots}

[[stage]]
role = "eval"
slots = 4
"""


def trainer_service(
    out: Path,
    sandbox: str,
    *,
    slots: int = 16,
    ready_limit: int = 16,
    backends: str = "",
    journal: str = "{run_dir}/rollout.journal",
    nice: int = 0,
) -> ChildService:
    """Return a service with its logs in `out`; it starts and ends as a context. `backends`: inline tables of TOML."""
    given = {"slots": slots, "ready_limit": ready_limit, "backends": backends, "journal": journal, "sandbox": sandbox}
    return ChildService(out, TOPOLOGY.format(**given), nice)
