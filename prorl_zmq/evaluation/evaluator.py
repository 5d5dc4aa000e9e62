"""`Evaluator`: submits the missing rollouts of an evaluation to a service, and stores each result as it arrives.

A result is in the folder before it is acknowledged, so a kill loses none. After SIGINT or SIGTERM, running jobs are
cancelled and results that have ended are kept; a second signal does not wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..client.asynchronous.client import AsyncRolloutClient
from ..client.submission import Submission
from ..client.trace_log import TraceLog
from ..errors import ProrlError
from ..system.processes import stop_signals
from ..system.stopping import Stopping
from ..wire.messages.jobs import Outcome
from .plan import jobs_of
from .run_folder import SERVICE, sample_of
from .service import OwnService, Readers, name_blocked, own_service, wait_ready
from .transcript import make_transcript

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..data.trajectory import Trajectory
    from ..service.child import ChildService
    from .problems import Problem
    from .run_folder import RunFolder, Sample

END_S = 5.0
"""How long a stop waits for cancelled jobs."""


class Watcher(Protocol):
    def waits(self, what: str) -> None:
        """The service is not ready yet: `what` is missing."""

    def starts(self) -> None:
        """The service is ready; jobs are submitted now."""

    def ended(self, sample: Sample) -> None: ...

    def troubled(self, message: str) -> None:
        """Report a problem that does not end the evaluation."""


@dataclass(slots=True)
class Evaluator:
    folder: RunFolder
    problems: Sequence[Problem]
    service: OwnService | Callable[[str], AsyncRolloutClient]
    watcher: Watcher
    start_s: float
    _readers: Readers | None = field(default=None, init=False)
    _traces: TraceLog | None = field(default=None, init=False)
    _stopping: Stopping = field(default_factory=Stopping, init=False)
    _ending: bool = field(default=False, init=False)
    """From now on cancelled jobs are those that this process cancelled."""

    def run(self) -> bool:
        """Run until each rollout has a result; false: a signal stopped it."""
        return asyncio.run(self._run())

    async def _run(self) -> bool:
        with stop_signals(self._stopping.stop):
            await self._stopping.until_stopped(self._with_service())
        return not self._stopping.stopped

    async def _with_service(self) -> None:
        service, session = self.service, self.folder.plan.session
        if not isinstance(service, OwnService):
            async with service(session) as client:
                await self._with_client(client, None)
            return
        # It starts before the client has threads, and blocks this loop, which has nothing else to do, when it ends.
        with own_service(self.folder.path / SERVICE, service) as running:
            async with AsyncRolloutClient(running.front_door, session=session) as client:
                await self._with_client(client, running)

    async def _with_client(self, client: AsyncRolloutClient, running: ChildService | None) -> None:
        backends = await wait_ready(client, running, self.start_s, self.watcher.waits)
        self._readers = Readers(backends, self.watcher.troubled)
        await self._readers.load()
        self.watcher.starts()
        blocked: asyncio.Task[None] | None = None
        if running is not None:
            blocked = asyncio.create_task(name_blocked(running.logs, self.watcher.troubled))
        try:
            async with TraceLog(client, self.folder.path) as self._traces:
                await self._submit(client)
        finally:
            if blocked is not None:
                blocked.cancel()

    async def _submit(self, client: AsyncRolloutClient) -> None:
        jobs = jobs_of(self.folder.plan, self.problems, self.folder.missing())
        submission = Submission(client, jobs, self._take)
        try:
            await submission.run()
        except (asyncio.CancelledError, ProrlError) as error:
            self._ending = True
            ending = asyncio.ensure_future(submission.end(END_S))
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:  # a second signal
                ending.cancel()
                await asyncio.wait({ending})
            raise error from None

    def _take(self, trajectory: Trajectory) -> None:
        """Store a result, unless it is stored already or this process cancelled the job."""
        assert self._readers is not None, "the tokenizers are loaded before anything is submitted"
        backend = trajectory.result.backend
        model = self._readers.model(backend) if backend else ""
        sample = sample_of(self.folder.plan, self.problems, trajectory, model)
        if sample is None or self.folder.has(sample.job_id):
            return
        if self._ending and sample.result.outcome == Outcome.CANCELLED:
            return
        self.folder.add(sample, trajectory, make_transcript(trajectory.job_id, trajectory, self._readers.of(backend)))
        if self._traces is not None:
            self._traces.note(sample.job_id)
        self.watcher.ended(sample)
