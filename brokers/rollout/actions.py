"""What the job table decides: the actions that its events give, for the broker to do in order."""

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
    """A job waits for a phase: a transition, and nothing to do."""

    job_id: str
    attempt: int
    phase: Phase
    error: ErrorInfo | None
    """What the attempt before was lost to."""


class Start(NamedTuple):
    stage_id: str
    command: StartPhase
    packed_job: bytes
    node: str = ""
    """Of the stage process."""


class Stop(NamedTuple):
    """Tell a stage process to end a phase whose result is not wanted."""

    stage_id: str
    claim: SlotClaim


class Close(NamedTuple):
    """Have some stage process of the sandbox's node remove it."""

    sandbox: SandboxHandle


class Unassign(NamedTuple):
    """Have the backend broker release the assignment that an attempt may claim."""

    claim: SlotClaim


class End(NamedTuple):
    finished: Finished


class Drop(NamedTuple):
    """Drop results that no client will fetch."""

    holder: str
    job_ids: Sequence[str]


Action = Queued | Start | Stop | Close | Unassign | End | Drop
