"""`BatchRunner`: the batches of all sessions; clients' batch requests and the batch sampler's actions.

The sampler's launches become jobs (`in_batch`) that the journal and the job table accept like a client's; the action
queue reports their ends (`job_ended`). Their results stay in the result store until the client has the group or the
group is discarded. Each change of the sampler is written to the journal in the same transaction as its cause, so a
restarted broker continues.

Owns the sampler; no socket, clock or file.
"""

from __future__ import annotations

import logging
from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

from ...data.conversations import own_rewards
from ...data.trajectory import oldest_version
from ...errors import Busy, InvalidBatch, InvalidJob, JournalFailed, ModelInUse, ProrlError
from ...metrics import catalog
from ...wire.messages.base import POLICY, new_id
from ...wire.messages.batches import BatchClosed
from ...wire.records import TEACHER, Recorded
from ..batches.batch_notes import notes_of, prompt_note, read_notes, weights_note
from ..batches.batch_records import CancelJobs, Discard, Launch, RememberedBatch, StartJobs
from ..batches.batch_sampler import BatchSampler
from ..batches.batch_view import batch_view, closed_view
from ..batches.group_filters import keep_policy
from ..batches.prompt import Prompt
from ..batches.rollout_group import Rollout
from ..job_frame import read_job
from ..journal.records import holder_of
from ..journal.segment_store import BlockLost
from .job_record import WORKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ...wire.messages.batches import BatchOptions, BatchReport, BatchStatus
    from ...wire.messages.jobs import ConversationPart, Job
    from ...wire.messages.watching import BatchView, ListSteps, StepList, ViewBatch
    from ..batches.batch_records import BatchAction, BatchRecord, SamplerAction, SessionRecord
    from ..batches.rollout_group import RolloutGroup
    from ..journal.records import Finished, JobState
    from .jobs import Jobs
    from .task_catalog import TaskCatalog

USERS_LIMIT = 1000
"""Most jobs that are counted when a model in use is to be removed."""
BATCH_LIMIT = 1024
"""Most open batches."""
PROMPT_LIMIT = 4096
"""Most waiting prompts of a batch."""
AGAIN_S = 1.0
"""How many seconds launches pause after the journal refused jobs."""

log = logging.getLogger("prorl.rollout_broker")


class BatchRunner:
    def __init__(self, jobs: Jobs, catalog: TaskCatalog, job_limit_bytes: int) -> None:
        self._jobs = jobs
        self._catalog = catalog
        self._job_limit_bytes = job_limit_bytes
        self._sampler = BatchSampler(
            lambda prompt: prompt.job.job_id,
            jobs.table.worked_s,
            lambda prompt, records: not _unasked(prompt.job, records),
        )
        self._batches = self._sampler.registry
        self._prompts = 0
        self._launch_at = 0.0
        self._weights: dict[str, float] = {}
        """Total weight of the open batches, by session."""
        self._refusal = ""
        """Why the journal last refused jobs; empty once it accepted some."""
        jobs.writes.collect_notes = self.note_changes

    # What clients ask -------------------------------------------------------------------------------------------------

    def open(self, session: str, batch_id: str, options: BatchOptions, now: float) -> BatchRecord:
        """Open a batch, or return the open batch with this id and the same options.

        Raises:
            InvalidBatch: another batch has this id, or the options are invalid.
            Busy: too many batches are open.
        """
        known = self._batches.find(batch_id)
        if known is not None:
            if (known.session, known.options) != (session, options):
                raise InvalidBatch(
                    f"another batch is called {batch_id}, of other options or another session; ids must be unique",
                    field="batch_id",
                )
            self._batches.heard(session, now)
            return known
        most = self._jobs.quota.most_jobs(_holder(session))
        if options.group_size > most:
            raise InvalidBatch(
                f"a group of {options.group_size} is more than a session may hold here now ({most} jobs: max_jobs, "
                "max_session_share)",
                field="group_size",
            )
        if len(self._batches) >= BATCH_LIMIT:
            raise Busy(f"{BATCH_LIMIT} batches are open, which is the limit; close some", retry_after_s=5.0)
        self._enqueue(self._sampler.open(session, batch_id, options, keep_policy(options.keep), now, key=new_id()))
        batch = self._batches.batch(batch_id)
        batch.began_at = now if batch.groups or batch.prompts else None
        return batch

    def feed(self, batch: BatchRecord, start: int, frames: Sequence[bytes], now: float, *, last: bool) -> None:
        """Add packed prompts to a batch, without those of an earlier request.

        Raises:
            InvalidBatch: prompts are missing before `start`.
            Busy: too many prompts wait.
            JournalFailed: the journal has no room.
            UnknownTask, InvalidJob, JobTooLarge, MalformedMessage: the prompt at `place` is not a valid job; no prompt
                was added.
        """
        if start > batch.fed:
            raise InvalidBatch(
                f"batch {batch.batch_id} was fed {batch.fed} prompts, and the next ones begin at {start}: does another "
                "client feed it?",
                field="start",
            )
        new = frames[batch.fed - start :]
        stream = _holder(batch.session)
        left = self._batches.sessions[batch.session].prompts
        waiting = len(batch.prompts if batch.state == "open" else left[batch.model])
        if new and waiting + len(new) > PROMPT_LIMIT:
            raise Busy(
                f"{waiting} prompts wait, and {PROMPT_LIMIT} may; feed them as they are wanted", retry_after_s=1.0
            )
        size_bytes = sum(map(len, new))
        self._jobs.quota.check(stream, 0, size_bytes)
        if new:
            self._jobs.writes.check_room(size_bytes)
        jobs = [self._read(batch, frame, place) for place, frame in enumerate(new, len(frames) - len(new))]
        prompts = []
        for job, frame in zip(jobs, new, strict=True):
            self._prompts += 1
            prompts.append(Prompt(self._prompts, batch.session, job, len(frame)))
            self._jobs.writes.note(*prompt_note(prompts[-1], batch.batch_id, frame))
            self._jobs.quota.prompts(stream, len(frame))
        if new and batch.began_at is None:
            batch.began_at = now
        self._enqueue(self._sampler.feed(batch.batch_id, prompts, now, last=last))

    def _read(self, batch: BatchRecord, frame: bytes, place: int) -> Job:
        try:
            job = read_job(frame, self._job_limit_bytes)
            self._catalog.check(job)
            if job.model != batch.model:
                raise InvalidJob(
                    f"job {job.job_id} is of the model {job.model!r}, and the batch of {batch.model!r}: open one with "
                    f"model={job.model!r}",
                    job_id=job.job_id,
                    field="model",
                )
            if unasked := _unasked(job, batch.options.complete):
                raise InvalidJob(
                    f"job {job.job_id} does not ask for the record {unasked[0]}, which the batch's rollouts must have: "
                    "name it in the job's record or teacher, or leave it out of complete",
                    job_id=job.job_id,
                    field="record",
                )
            if job.outside is not None:
                raise InvalidJob(
                    "a batch starts its own jobs, whose addresses no program outside knows: open each with "
                    "`client.endpoint`",
                    job_id=job.job_id,
                    field="outside",
                )
        except ProrlError as error:
            error.fields["place"] = place
            raise
        return job

    def find(self, session: str, batch_id: str) -> BatchRecord:
        """Return an open batch of a session, for reading.

        Raises:
            UnknownBatch: the session has no such batch.
        """
        return self._batches.batch(batch_id, session)

    def wanted_prompts(self, batch: BatchRecord) -> int:
        """Return how many more prompts a batch can use soon: enough jobs for all slots of INIT and RUN once more.

        The slots thus stay busy while the client does its own work.
        """
        room = max(1, self._jobs.table.working_slots())
        return min(batch.wanted_prompts(room), PROMPT_LIMIT)

    def acknowledge(self, batch: BatchRecord, group_ids: Iterable[str]) -> None:
        for group in self._sampler.acknowledge(batch.batch_id, group_ids):
            self._discard(group.session, [rollout.job_id for rollout in group.rollouts.values()])

    def results(self, group: RolloutGroup) -> list[Finished] | None:
        """Return the results of a complete group, by place; None until all are durable."""
        found = []
        for index in range(group.size):
            job_id = group.rollouts[index].job_id
            finished = self._jobs.results.get(job_id)
            if finished is None or self._jobs.results.is_held_back(job_id):
                return None
            found.append(finished)
        return found

    def mark_given(self, group: RolloutGroup, client_id: str, now: float) -> None:
        self._sampler.mark_given(group, client_id, now)

    def closed(self, session: str, request_id: str) -> BatchClosed | None:
        """Return the reply to a request that closed a batch, or None."""
        return self._batches.closed(session, request_id)

    def close(self, batch: BatchRecord, request_id: str, now: float) -> BatchClosed:
        """Close a batch and return its final status and report."""
        status = batch.status()
        self._enqueue(self._sampler.close(batch.batch_id, now))
        reply = BatchClosed(request_id, status, batch.stats.report())  # with what was carried over, or cancelled
        _count(reply.report)
        self._sampler.note_closed(batch.session, reply)
        return reply

    def heard(self, session: str, now: float) -> None:
        self._batches.heard(session, now)

    def sessions(self) -> Mapping[str, SessionRecord]:
        """Return the sessions with batches or carried groups, for reading."""
        return self._batches.sessions

    def end_session(self, session: str, now: float) -> int | None:
        """Remove a session's batches; return their number, or None if the session is unknown."""
        record = self._batches.sessions.get(session)
        if record is None:
            return None
        batches = len(record.batches)
        self._enqueue(self._sampler.close_session(session, now))
        return batches

    def set_version(self, model: str, weight_version: int, now: float) -> None:
        self._jobs.writes.note(*weights_note(model, weight_version))
        self._batches.steps.weights_changed(model, weight_version, now)
        self._catalog.note_model(model)
        self._enqueue(self._sampler.set_version(weight_version, now, model))

    def remove_model(self, model: str) -> None:
        """Accept no more jobs of an adapter until it is published again.

        Raises:
            ModelInUse: unfinished jobs or open batches name it.
        """
        names, packed_name = self._catalog.names, model.encode() if model != POLICY else b""  # jobs omit the default
        jobs = (one for one in self._jobs.table.records.values() if packed_name in one.packed and names(one.job, model))
        users = sum(1 for _ in islice(jobs, USERS_LIMIT))
        batches = 0
        for batch in self._batches.batches.values():
            prompts = chain(batch.prompts, (group.prompt for group in batch.groups.values()))
            if batch.state == "open" and (batch.model == model or any(names(one.job, model) for one in prompts)):
                batches += 1
        if users or batches:
            at_least = "at least " if users == USERS_LIMIT else ""
            raise ModelInUse(
                f"{at_least}{users} unfinished jobs and {batches} open batches use the model {model}; end them first",
                model=model,
                jobs=users,
            )
        self._catalog.remove_model(model)

    def keep_model(self, model: str) -> bool:
        """Accept jobs of an adapter again, if its removal was begun: the backend broker has refused it."""
        return self._catalog.keep_model(model)

    def status(self, batch: BatchRecord) -> BatchStatus:
        status = batch.status()
        idle = batch.state == "open" and not batch.in_flight and bool(batch.groups or batch.prompts)
        if idle and self._refusal:
            return msgspec.structs.replace(status, problem=self._refusal)
        if idle and self._jobs.quota.room(_holder(batch.session)) <= 0:
            problem = (
                "its session holds as much as it may (max_jobs, max_held_bytes, max_session_share): fetch groups, "
                "close batches, or ask for smaller groups"
            )
            return msgspec.structs.replace(status, problem=problem)
        return status

    def statuses(self) -> tuple[BatchStatus, ...]:
        return tuple(self.status(batch) for batch in self._batches.batches.values())

    def view(self, request: ViewBatch, now: float, at: float) -> BatchView:
        """Return the view of a batch of any session, open or closed; `at` is `now` in seconds since 1970.

        Raises:
            UnknownBatch: no batch or several batches have an id that begins with the given one.
        """
        batch, version = self._batches.look_for(request.batch_id), self._batches.version

        def wall(time: float | None) -> float | None:
            return at - (now - time) if time is not None else None

        if isinstance(batch, RememberedBatch):
            return closed_view(request.request_id, batch, version, wall)
        status = self.status(batch)
        worked_s = self._jobs.table.worked_s
        return batch_view(request.request_id, batch, status, version, lambda job_id: worked_s(job_id, now), wall)

    def steps(self, request: ListSteps, now: float, at: float) -> StepList:
        """Return the last closed batches; `at` is `now` in seconds since 1970."""
        return self._batches.steps.listed(request.request_id, now, at)

    # What happens -----------------------------------------------------------------------------------------------------

    def job_ended(self, finished: Finished, now: float) -> None:
        """Report the end of a batch's job to the sampler; its result is in the result store."""
        result = finished.result
        if result.job_id not in self._sampler:
            self._discard(finished.session, [result.job_id])
            return
        lacking = {one.name: "rows are missing" for one in result.records if not one.complete} | result.records_dropped
        if lacking:
            log.warning("records of job %s are missing: %s", result.job_id, lacking)
        version = self._batches.version(result.model)
        if result.reward is not None and (oldest := self._oldest(finished, version)) is not None:
            others = _others(result.conversations) if result.conversations else ()
            seconds = _seconds(finished)
            roles, records = own_rewards(result), tuple(one.name for one in result.records if one.complete)
            rollout = Rollout(result.job_id, result.reward, result.tokens, oldest, seconds, roles, others, records)
            for model, version_of in ((result.model, oldest), *others):
                catalog.STALENESS.observe(max(0, self._batches.version(model) - version_of), model)
            self._enqueue(self._sampler.job_completed(rollout, now))
            if not np.isfinite(result.reward):
                self._discard(finished.session, [result.job_id])
        else:
            reason = result.error.code if result.error is not None else "no_reward"
            self._enqueue(self._sampler.job_failed(result.job_id, reason, now))
            self._discard(finished.session, [result.job_id])

    def block_lost(self, finished: Finished, now: float) -> None:
        """Replace a rollout whose trajectory was lost."""
        self._enqueue(self._sampler.rollout_lost(finished.result.job_id, now))

    def launch(self, now: float) -> None:
        weights = self._batches.weights()
        if weights != self._weights:
            self._weights = weights
            self._jobs.table.counts.weigh_batches(weights)
        if now < self._launch_at or not weights:
            return
        of_task = _RoomByKey(self._jobs.table.room)
        of_session = _RoomByKey(
            lambda stream: self._jobs.quota.room(stream) if self._jobs.quota.may_start(stream) else 0
        )

        def may_start(prompt: Prompt) -> bool:
            task, stream = prompt.job.task, _holder(prompt.session)
            if of_task[task] <= 0 or of_session[stream] <= 0:
                return False
            of_task[task] -= 1
            of_session[stream] -= 1
            return True

        self._enqueue(self._sampler.launch(may_start, now))

    def tick(self, now: float) -> None:
        self._enqueue(self._sampler.tick(now))

    def note_changes(self) -> None:
        changes = self._sampler.take_changes()
        for prompt in changes.gone_prompts:
            self._jobs.quota.prompts(_holder(prompt.session), -prompt.size_bytes)
        for name, note in notes_of(changes).items():
            self._jobs.writes.note(name, note)

    def recover(
        self, notes: Mapping[str, bytes], unfinished: Sequence[JobState], uncollected: Sequence[Finished], now: float
    ) -> None:
        """Continue an earlier broker's batches, after the table and the result store have its jobs and results."""
        jobs = {state.job_id for state in unfinished if state.in_batch}
        results = {one.result.job_id: one for one in uncollected if one.in_batch}
        found = read_notes(notes, lambda job_id: job_id in jobs or job_id in results, now)
        for number, prompt in found.prompts.items():
            self._prompts = max(self._prompts, number)
            self._jobs.quota.prompts(_holder(prompt.session), prompt.size_bytes)
        actions = self._sampler.restore(found.sessions.values(), found.batches, found.groups, found.versions, now)
        known = {rollout.job_id for group in found.groups for rollout in group.rollouts.values()}
        self._enqueue(actions)
        for job_id in jobs:
            if job_id not in self._sampler:
                self._jobs.cancel(job_id, now)
        for job_id, finished in results.items():
            if job_id not in known:
                self.job_ended(finished, now)
        if found.sessions:
            log.info("took up %d batches and %d groups from the journal", len(found.batches), len(found.groups))

    # Actions ----------------------------------------------------------------------------------------------------------

    def perform(self, action: BatchAction, now: float) -> None:
        match action:
            case StartJobs():
                self._submit(action.launches, now)
            case CancelJobs():
                for job_id in action.job_ids:
                    self._jobs.cancel(job_id, now)
            case Discard():
                for rollout in action.rollouts:
                    finished = self._jobs.results.get(rollout.job_id)
                    if finished is not None:
                        self._discard(finished.session, [rollout.job_id])

    def _enqueue(self, actions: list[SamplerAction]) -> None:
        self._jobs.queue.extend(action for action in actions if isinstance(action, CancelJobs | Discard))
        if launches := tuple(action for action in actions if isinstance(action, Launch)):
            self._jobs.queue.append(StartJobs(launches))

    def _submit(self, launches: tuple[Launch, ...], now: float) -> None:
        jobs = [(one.session, *one.prompt.make_job(one.group_id, one.job_id)) for one in launches]
        try:
            self._jobs.submit(jobs, now, in_batch=True)  # writes their groups' notes first
        except JournalFailed as error:
            self._refusal = error.message
            self._sampler.not_started([launch.job_id for launch in launches])
            self._launch_at = now + AGAIN_S
        else:
            self._refusal = ""

    def _discard(self, session: str, job_ids: list[str]) -> None:
        self._jobs.discard(_holder(session), job_ids)

    def _oldest(self, finished: Finished, version: int) -> int | None:
        """Return a trajectory's oldest weight version; `version` without generated tokens, None if unreadable."""
        result = finished.result
        if result.kept is not None:
            oldest = result.kept.oldest_version
        elif finished.block is None:
            oldest = -1
        else:
            try:
                block = self._jobs.block(finished)
            except (BlockLost, JournalFailed) as error:  # the sampler has to know of each end
                log.warning("the batch of job %s cannot use its trajectory: %s", result.job_id, error)
                return None
            buffer = block.buffer if isinstance(block, zmq.Frame) else block
            oldest = oldest_version(buffer, result)
        return oldest if oldest >= 0 else version


def _unasked(job: Job, records: Sequence[str]) -> list[str]:
    """Return which of these records a job does not ask for."""
    asked = {*Recorded.parse(job.record).names, *((TEACHER,) if job.teacher else ())}
    return [name for name in records if name not in asked]


def _others(parts: Sequence[ConversationPart]) -> tuple[tuple[str, int], ...]:
    """Return the oldest weight version of each other model's tokens."""
    oldest: dict[str, int] = {}
    for part in parts:
        if part.model and part.oldest_version >= 0:
            oldest[part.model] = min(part.oldest_version, oldest.get(part.model, part.oldest_version))
    return (*oldest.items(),)


class _RoomByKey(dict[str, int]):
    """Room for jobs by task or session, computed at first access."""

    def __init__(self, room: Callable[[str], int]) -> None:
        super().__init__()
        self._room = room

    def __missing__(self, place: str) -> int:
        self[place] = self._room(place)
        return self[place]


def _count(report: BatchReport) -> None:
    for fate in ("kept", "dropped", "given_up"):
        catalog.GROUPS_ENDED.add(fate, amount=getattr(report, f"{fate}_groups"))
    for reason, rollouts in report.wasted.items():
        catalog.ROLLOUTS_WASTED.add(reason, amount=rollouts)
        catalog.ROLLOUTS_WASTED_SECONDS.add(reason, amount=report.wasted_s[reason])


def _holder(session: str) -> str:
    return holder_of(session, in_batch=True)


def _seconds(finished: Finished) -> float:
    timings = finished.result.timings
    return sum(timings.get(phase, 0.0) for phase in WORKING)
