"""The kinds of sandbox, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .apptainer import ApptainerContainer, apptainer_problem
from .bubblewrap import BubblewrapContainer, bubblewrap_problem
from .process import ProcessContainer

if TYPE_CHECKING:
    from pathlib import Path

    from ...wire.messages.jobs import SandboxKind
    from .container import Container
    from .specification import SandboxSpec

_CONTAINERS: dict[str, type[Container]] = {
    cls.kind: cls for cls in (ApptainerContainer, BubblewrapContainer, ProcessContainer)
}


def make_container(kind: SandboxKind, path: Path, spec: SandboxSpec) -> Container:
    """Make a container that is not started yet."""
    return _CONTAINERS[kind](path, spec)


def problem_with(kind: SandboxKind) -> str | None:
    """Try whether this machine can make the kind; give what is wrong and what to do, or None. Blocks briefly."""
    match kind:
        case "apptainer":
            return apptainer_problem()
        case "bubblewrap":
            return bubblewrap_problem()
        case "process":
            return None
