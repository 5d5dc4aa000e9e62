"""`RunningPhases`: the phases that a stage process runs now, from the broker's command to the event of their end."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..data.last_turns import turns_so_far
from ..errors import MalformedMessage
from ..system.logs import about_job
from ..system.traces import current
from ..wire import codec
from ..wire.messages.jobs import Job, Phase
from ..wire.messages.stages import PhaseDone, TurnsShown
from ..wire.sockets import MAX_FRAME_BYTES
from .phase_ends import count_phase
from .phase_runner import PhaseRunner
from .score_runner import ScoreRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import zmq

    from ..wire.messages.stages import ShowTurns, StartPhase, StopPhase
    from ..wire.sockets import Frame
    from .event_outbox import EventOutbox
    from .handler import AgentHandler
    from .stage_services import StageServices

SENT_AT_ONCE = 16
"""Most ends of phases that are sent together: sent one by one, each would wake libzmq's thread and the broker."""

log = logging.getLogger("prorl.stage")


@dataclass(slots=True)
class _Running:
    attempt: int
    origin: str
    runner: PhaseRunner | ScoreRunner
    task: asyncio.Task[None] = field(init=False)

    def stop(self) -> None:
        """Cancel the phase once it has begun: a task cancelled before its first step reports nothing."""
        asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self.task.cancelling():  # a second cancel would interrupt the phase's clean-up
            self.task.cancel()


class RunningPhases:
    """The phases of one process, by job.

    Args:
        handlers: the tasks of the process, by name.
        outbox: numbers and keeps the events.
        send: sends the frames of events.
    """

    def __init__(
        self,
        handlers: Mapping[str, AgentHandler[Any]],
        outbox: EventOutbox,
        send: Callable[[list[list[Frame]]], None],
    ) -> None:
        self._handlers, self._outbox, self._send = handlers, outbox, send
        self._running: dict[str, _Running] = {}
        self._ended: list[list[Frame]] = []
        """Events added in this iteration of the loop, not sent yet."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def attempts(self) -> dict[str, int]:
        """The attempt of each job."""
        return {job_id: running.attempt for job_id, running in self._running.items()}

    @property
    def origins(self) -> dict[str, str]:
        """The origins of the jobs that have one (`StartPhase.origin`)."""
        return {job_id: running.origin for job_id, running in self._running.items() if running.origin}

    def start(self, command: StartPhase, frames: Sequence[bytes | zmq.Frame], services: StageServices) -> None:
        """Start a phase; an earlier one of its job is stopped. The frames are those of `StartPhase`.

        Raises:
            MalformedMessage: the frames are not a job, and for SCORE its token ids.
        """
        is_score = command.phase == Phase.SCORE
        if is_score != (command.text is not None) or len(frames) != 1 + is_score:
            needed = "2 frames (job, token ids)" if is_score else "1 frame (job)"
            raise MalformedMessage(f"start_phase of {command.phase} needs {needed}, got {len(frames)}")
        packed = frames[0]
        job = codec.decode(packed if isinstance(packed, bytes) else packed.bytes, Job, limit_bytes=MAX_FRAME_BYTES)
        before = self._running.get(command.job_id)
        if before is not None:
            before.stop()  # the broker starts a new attempt only after it has given up that one
        self._outbox.started(command.job_id, command.attempt)
        runner: PhaseRunner | ScoreRunner
        if command.text is None:
            runner = PhaseRunner(services, command, job, self._handlers[job.task])
        else:
            ids = frames[1]
            runner = ScoreRunner(services, command, job, ids if isinstance(ids, bytes) else ids.bytes)
        running = self._running[command.job_id] = _Running(command.attempt, command.origin, runner)
        name = f"{command.phase} of job {command.job_id}"
        running.task = asyncio.create_task(self._run(command, running), name=name)

    def stop(self, command: StopPhase) -> None:
        running = self._running.get(command.job_id)
        if running is not None and running.attempt == command.attempt:
            running.stop()

    def stop_all(self) -> list[asyncio.Task[None]]:
        """Stop all phases; return their tasks."""
        for running in self._running.values():
            running.stop()
        return [running.task for running in self._running.values()]

    def add_time(self, seconds: float) -> None:
        """Extend the limits of all phases by a pause of this process."""
        for running in self._running.values():
            running.runner.add_time(seconds)

    def turns_shown(self, question: ShowTurns, stage_id: str) -> list[Frame]:
        """Return the frames of the answer: the last turns so far of a rollout, if it runs here."""
        so_far, block = None, None
        held = self._running.get(question.job_id)
        if held is not None and held.attempt == question.attempt and isinstance(held.runner, PhaseRunner):
            episode, backend = held.runner.rollout.so_far
            trajectory = episode.so_far() if episode.so_far is not None else episode.whole()
            steps = tuple(episode.steps)
            so_far, block = turns_so_far(trajectory.arrays(), backend, steps, question.known_tokens)
        answer = TurnsShown(
            stage_id=stage_id,
            job_id=question.job_id,
            attempt=question.attempt,
            known_tokens=question.known_tokens,
            origin=question.origin,
            so_far=so_far,
        )
        header = codec.encode(answer, is_plain=True)
        return [header] if block is None else [header, block.data]

    async def _run(self, command: StartPhase, running: _Running) -> None:
        with about_job(command.job_id, command.attempt, command.phase):
            log.debug("%s began", command.phase)
            try:
                with current(command.traceparent):
                    event, block = await running.runner.run()
            finally:  # reports must not renew the lease of an ended phase, whatever its outcome
                is_wanted = self._running.get(command.job_id) is running
                if is_wanted:
                    del self._running[command.job_id]
            log.debug("%s %s", command.phase, "is done" if isinstance(event, PhaseDone) else "failed")
        count_phase(running.runner.job.task, event)
        if is_wanted:
            data = None if block is None else block.data
            if command.origin:
                event = msgspec.structs.replace(event, origin=command.origin)
            self._ended.append(self._outbox.add(event, data, time.monotonic()))
            if len(self._ended) == SENT_AT_ONCE:
                self.send_ended()
            elif len(self._ended) == 1:
                asyncio.get_running_loop().call_soon(self.send_ended)

    def send_ended(self) -> None:
        """Send the events of the phases that ended in this iteration of the loop."""
        ended, self._ended = self._ended, []
        self._send(ended)
