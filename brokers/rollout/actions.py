"""The actions that the job table returns, for the broker to perform in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...errors import ErrorInfo
    from ...wire.messages.jobs import Phase, SandboxHandle
    from ...wire.messages.stages import StartPhase
    from ..journal.records import Finished
    from .stage_pool import SlotClaim


class Queued(NamedTuple):
    """A job waits for a phase; a transition without an action."""

    job_id: str
    attempt: int
    phase: Phase
    error: ErrorInfo | None
    """The error that ended the attempt before."""


class Start(NamedTuple):
    stage_id: str
    command: StartPhase
    packed_job: bytes
    node: str = ""
    """The stage process's node."""


class Stop(NamedTuple):
    """Tell a stage process to stop a phase whose result is not wanted."""

    stage_id: str
    claim: SlotClaim


class Close(NamedTuple):
    """Have a stage process of the sandbox's node remove the sandbox."""

    sandbox: SandboxHandle


class Unassign(NamedTuple):
    """Have the backend broker release an attempt's assignment, if any."""

    claim: SlotClaim


class End(NamedTuple):
    finished: Finished


class Drop(NamedTuple):
    """Drop results that no client will fetch."""

    holder: str
    job_ids: Sequence[str]


Action = Queued | Start | Stop | Close | Unassign | End | Drop
