"""`ScoreRunner`: SCORE of one job, in which its teacher scores the policy's tokens.

The phase only waits: for a backend of the teacher, and for its answers. A failure drops the scores; the job keeps its
outcome.
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ..data.scores import scores_record
from ..errors import Cancelled, HandlerFailed, InternalError, InvalidJob, PhaseTimeout
from ..system.open_files import wait_for_descriptors
from ..system.traces import span
from ..wire.messages.jobs import Outcome, Phase
from ..wire.messages.stages import PhaseDone, PhaseFailed
from ..wire.records import teacher_of
from ..wire.sockets import MAX_FRAME_BYTES
from .handler import failure_of
from .job_backend import JobBackend, PhaseClock
from .phase_ends import readable
from .phase_runner import DESCRIPTORS, DESCRIPTORS_LIMIT_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..wire.messages.jobs import Job
    from ..wire.messages.stages import StartPhase, TextToScore
    from .stage_services import StageServices

log = logging.getLogger("prorl.stage")


class ScoreRunner:
    """Scores one trajectory; `run` is called once.

    Args:
        services: of the process.
        command: has the `text`.
        job: names the teacher.
        token_ids: of the trajectory, int32 as bytes; empty: they are lost.
    """

    def __init__(self, services: StageServices, command: StartPhase, job: Job, token_ids: bytes) -> None:
        self.job = job
        self._services, self._command, self._token_ids = services, command, token_ids
        self._clock = PhaseClock(job.limits.teacher_s)

    async def run(self) -> tuple[PhaseDone | PhaseFailed, NDArray[np.uint8] | None]:
        """Return the event that ends the phase, and the block of the record. Never raises.

        Cancelling the call once ends the phase with outcome `cancelled`.
        """
        text = self._command.text
        assert text is not None, "SCORE comes with a text"
        try:
            await wait_for_descriptors(DESCRIPTORS, DESCRIPTORS_LIMIT_S)
            async with self._clock.limit():
                return await self._score(text)
        except BaseException as error:  # noqa: BLE001 - as in `PhaseRunner.run`
            return readable(self._failed(error)), None

    def add_time(self, seconds: float) -> None:
        """Extend the phase's limit by a pause of this process."""
        self._clock.add(seconds)

    async def _score(self, text: TextToScore) -> tuple[PhaseDone, NDArray[np.uint8] | None]:
        if len(self._token_ids) != 4 * text.tokens:
            raise InternalError("the trajectory is lost or damaged; the log of its broker says more")
        services, (model, top) = self._services, teacher_of(self.job.teacher)
        token_ids = np.frombuffer(self._token_ids, np.int32)
        own = np.concatenate([token_ids[start:end] for start, end in text.ranges])
        edges = [0, *accumulate(end - start for start, end in text.ranges)]
        attempt, more = self._command.attempt, (services.backends, services.engines, self._clock)
        backend = JobBackend(self.job, attempt, *more, model=model)
        try:
            with span("score by the teacher"):
                scores = await backend.score(own, edges[1:-1], top, text.chat)
        finally:
            backend.release()
        records, block = scores_record(text.ranges, scores)
        if len(block) > MAX_FRAME_BYTES:
            raise InvalidJob(f"its scores would have {len(block)} bytes", field="teacher")
        done = PhaseDone(
            stage_id=services.stage_id,
            job_id=self.job.job_id,
            attempt=attempt,
            phase=Phase.SCORE,
            metrics={"scored_tokens": float(len(own)), "teacher_weight_version": float(scores.weight_version)},
            timings=self._timings,
            records=records,
            kept=text.kept,
        )
        return done, block if records else None

    def _failed(self, error: BaseException) -> PhaseFailed:
        outcome = Outcome.INFRASTRUCTURE_ERROR
        if isinstance(error, asyncio.CancelledError):
            outcome, info = Outcome.CANCELLED, Cancelled("the phase was stopped").info()
        elif isinstance(error, TimeoutError) and self._clock.expired:
            limit_s = self._clock.limit_s
            message = f"the teacher took longer than {limit_s:g} s"
            info = PhaseTimeout(message, phase=Phase.SCORE, limit_s=limit_s).info()
        else:
            known = error if isinstance(error, Exception) else HandlerFailed(f"scoring raised {error!r}")
            info = failure_of(known).error
        if outcome != Outcome.CANCELLED:
            log.warning("the trajectory has no scores of the teacher %s: %s", self.job.teacher, info.message)
        return PhaseFailed(
            stage_id=self._services.stage_id,
            job_id=self.job.job_id,
            attempt=self._command.attempt,
            phase=Phase.SCORE,
            timings=self._timings,
            outcome=outcome,
            error=info,
        )

    @property
    def _timings(self) -> dict[str, float]:
        return {Phase.SCORE: time.monotonic() - self._clock.began}
