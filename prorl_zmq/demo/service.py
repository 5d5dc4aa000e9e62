"""The demo's own service: a child process with the embedded engine, in a run folder of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..service.child import ChildService

if TYPE_CHECKING:
    from pathlib import Path

TOPOLOGY = """\
[rollout_broker]
ready_limit = 16

[sandbox]
kind = "{sandbox}"

[[stage]]
role = "init"
slots = 4

[[stage]]
role = "run"
slots = 16

[[stage]]
role = "eval"
slots = 4

[[backends]]
kind = "embedded"
model = "{model}"
"""


def demo_service(out: Path, model: Path, sandbox: str) -> ChildService:
    """Return a service for the demo; it starts and ends as a context."""
    return ChildService(out, TOPOLOGY.format(sandbox=sandbox, model=model.absolute()))
