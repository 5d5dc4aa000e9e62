"""`AsyncRolloutClient`: a trainer's client of the service, on asyncio.

    async with AsyncRolloutClient() as client:
        await client.submit(jobs)
        async for trajectory in client.stream():
            learn(trajectory.token_ids, trajectory.reward)

Results belong to the client's session and stay at the service until they are acknowledged: by the `collect` after the
one that returned them, or by `close`.
"""

from __future__ import annotations

import time
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from msgspec.structs import replace

from ...errors import Busy, ProrlError, RequestTimeout
from ...security.keyring import CLIENT, Keyring
from ...system.run_places import front_door_at
from ...wire.messages.base import POLICY, new_id
from ...wire.messages.batches import SessionAlive
from ...wire.messages.front_door import Cancel, Status, Trace
from ...wire.messages.jobs import Job, TrainOn
from ...wire.messages.nodes import ListNodes, NodeList
from ..batch_progress import BatchProgress, batch_options
from ..current_trace import in_current_trace, submit_span
from ..delivery import CollectState
from ..keep_alive import KeepAlive
from ..requests import IDS_PER_REQUEST, NAMELESS_S, POLL_S, check_job_ids, submissions
from .backends import AsyncBackends
from .batch import AsyncBatch
from .connection import AsyncServiceConnection
from .endpoint import AsyncEndpoint
from .transport import Lock, sleep
from .views import AsyncViews
from .weights import AsyncWeightUpdates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from ...data.scores import Scores
    from ...data.trajectory import Trajectory
    from ...wire.messages.batches import CarryOver, GroupFilter
    from ...wire.messages.front_door import Accepted, Cancelled, JobTrace, ServiceStatus, Submit


class AsyncRolloutClient(AsyncWeightUpdates):
    """Submits jobs and collects trajectories on an asyncio loop. Concurrent calls are allowed.

    Args:
        endpoint: the service's front door, or the name of a service on this machine (`prorl serve --name`). None: that
            of `$PRORL_NAME`, or of `prorl serve` without a topology file.
        session: the name that separates its jobs and results from other trainers'. A restarted trainer passes its old
            session to collect what it had submitted. None: a new session, which the service ends, with its jobs and
            results, 10 minutes after its client is gone.
        timeout_s: longest time in seconds that a call waits for the service, by default.
        keys: for a service over TCP with keys: the folder with the client's key and the service's public key, or the
            client's secret file in it (see SECURITY.md). None: `$PRORL_KEYS`, and without it no keys.
        service: the folder of `prorl serve --service`, which has the keys and the address of the session's broker, also
            after a move; in place of `endpoint`. Several brokers share the sessions.

    Raises:
        ConfigError: the key folder, or the service's, is not private, or a key is missing.
        InvalidEndpoint: the endpoint is malformed.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        session: str | None = None,
        timeout_s: float = 30.0,
        keys: str | Path | None = None,
        service: str | Path | None = None,
    ) -> None:
        self.session = session if session is not None else new_id()
        self._lease_s = NAMELESS_S if session is None else None
        folder = None
        if service is None:
            endpoint = front_door_at(endpoint)
        else:
            from ...service.service_folder import ServiceFolder  # imports what makes and locks one

            folder = ServiceFolder.open(Path(service))
            keys = keys if keys is not None else folder.keys("client")
        self._another = partial(AsyncRolloutClient, endpoint, timeout_s=timeout_s, keys=keys, service=service)
        """Makes a client of the same service, with a session of its own."""
        self._service = AsyncServiceConnection(endpoint, Keyring.load(keys, CLIENT), timeout_s, folder, self.session)
        self._collecting = CollectState(self.session, new_id())
        self._collect_turn = Lock()
        self._keep_alive: KeepAlive | None = None
        self._holding = {}
        self.backends = AsyncBackends(self._service)
        """The inference backends: add, drain, remove, clear, list."""
        self.views = AsyncViews(self._service)
        """For operators: jobs as table rows, results of ended jobs, and batches in detail."""

    @property
    def timeout_s(self) -> float:
        """Longest time, in seconds, that a call waits for the service unless it names another."""
        return self._service.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._service.timeout_s = timeout_s

    async def submit(
        self, jobs: Job | Iterable[Job], *, timeout_s: float | None = None, busy_s: float | None = None
    ) -> list[str]:
        """Submit jobs and return their ids; from then on the service ends each in exactly one outcome.

        While the service is full or starting, the call retries until its time is up. All jobs of one call must fit; a
        session with more jobs (`max_jobs`, `max_session_share`) submits in parts and collects in between.

        Args:
            jobs: those to submit.
            timeout_s: longest time in seconds for the whole call; None: the client's `timeout_s`.
            busy_s: longest time in seconds to retry while the service is full; None: until the timeout.

        Raises:
            UnknownTask, InvalidJob, JobTooLarge, DuplicateJob: a job was rejected, and with it all jobs of its request.
            TypeError: one of them is not a `Job`.
            Busy: the service stayed full.
            RequestTimeout: the service did not answer.
        """
        until = self._service.until(timeout_s)
        limit_bytes = (await self._service.hello(until)).job_limit_bytes
        busy_until = until if busy_s is None else min(until, time.monotonic() + busy_s)
        accepted: list[str] = []
        given = in_current_trace([jobs] if isinstance(jobs, Job) else jobs)
        if self._lease_s is not None:
            self._renew(self._lease_s)
        for request, packed, ids in submissions(self.session, given, limit_bytes, self._lease_s):
            begun = self._collecting.begin(ids)
            try:
                with submit_span(len(ids)):
                    reply = await self._submit(request, packed, until, busy_until)
            except ProrlError:
                self._collecting.refused(begun)
                raise
            self._collecting.expect(ids, reply.journal_id)
            accepted += ids
        return accepted

    def endpoint(
        self, job: Job, *, idle_s: float = 600.0, train_on: TrainOn = ("all",), timeout_s: float | None = None
    ) -> AsyncEndpoint:
        """Open a rollout to your own program at an OpenAI-style address, by `async with`: see `AsyncEndpoint`."""
        return AsyncEndpoint(self.submit, self._service, self._collecting, job, idle_s, train_on, timeout_s)

    async def collect(self, max_results: int = 64, *, wait_s: float | None = None) -> list[Trajectory]:
        """Return up to `max_results` finished jobs of the session; wait up to `wait_s` seconds for the first.

        This call acknowledges the results of earlier ones. An empty list means that none came in time. Concurrent calls
        take turns.

        Raises:
            JobsLost: the rollout broker was restarted without its journal.
            RequestTimeout: the service did not answer.
        """
        until = time.monotonic() + (self.timeout_s if wait_s is None else wait_s)
        while not self._collecting.waiting:
            await self._collect(max_results, min(max(0.0, until - time.monotonic()), POLL_S))
            self._collecting.check_lost()
            if time.monotonic() >= until:
                break
        return self._collecting.take(max_results)

    async def stream(self, *, timeout_s: float | None = None) -> AsyncIterator[Trajectory]:
        """Yield the session's trajectories as they finish, until every submitted job has ended.

        A trajectory is acknowledged when the next one is requested; if its consumer dies, the session gets it again.

        Args:
            timeout_s: longest time in seconds without a new trajectory; None: no limit, since jobs have their own.

        Raises:
            JobsLost: the rollout broker was restarted without its journal.
            RequestTimeout: nothing finished for that time, or the service did not answer.
        """
        last = time.monotonic()
        wait = 0.0
        while True:
            await self._collect(64, wait)
            self._collecting.check_lost()
            if self._collecting.waiting:
                while self._collecting.waiting:
                    yield self._collecting.take(1)[0]
                last = time.monotonic()
            elif not self._collecting.remaining:
                return
            elif timeout_s is not None and time.monotonic() - last >= timeout_s:
                raise RequestTimeout(
                    f"no job ended for {timeout_s:g} s; {self._collecting.remaining} are still going on",
                    timeout_s=timeout_s,
                )
            left = POLL_S if timeout_s is None else timeout_s - (time.monotonic() - last)
            wait = max(0.0, min(left, POLL_S)) if self._collecting.remaining else 0.0

    @overload
    async def score(
        self,
        trajectories: Sequence[Trajectory],
        *,
        model: str = "teacher",
        top: int = 20,
        timeout_s: float | None = None,
    ) -> list[Scores]: ...

    @overload
    async def score(
        self,
        trajectories: Sequence[Trajectory],
        *,
        model: str = "teacher",
        top: int = 20,
        timeout_s: float | None = None,
        return_errors: bool,
    ) -> list[Scores | ProrlError]: ...

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        *,
        model: str = "teacher",
        top: int = 20,
        timeout_s: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Return a model's log-probs of each trajectory's tokens, and of the likeliest tokens at each position.

        An engine of the model reads each segment in one forward pass. Scoring has a session of its own, and engines
        put generations first.

        Args:
            trajectories: what to score; one without tokens has scores of length 0.
            model: a model of `[[backends]]` with the tokenizer of the trajectories, or `policy`.
            top: how many of the likeliest tokens to return for each position, from 0 to 64.
            timeout_s: longest time in seconds without a new score; None: no limit, since jobs have their own.
            return_errors: return the error of a trajectory that cannot be scored in the place of its scores, so that
                the others are not lost; otherwise the first such error is raised.

        Raises:
            InvalidJob: no backend serves the model, it cannot score, its tokenizer has other ids for the same tokens,
                or its context is too short; or `top` is over a limit (`field` names what is wrong).
            ProrlError: a trajectory (`job_id`) could not be scored, such as `EngineFailed` and `NoBackend`.
            RequestTimeout: no trajectory was scored for that time, or the service did not answer.
        """
        async with self._another() as client:
            return await client._score(trajectories, model, top, timeout_s, return_errors)  # noqa: SLF001 - of this class

    async def cancel(self, job_ids: str | Iterable[str], *, timeout_s: float | None = None) -> dict[str, str]:
        """End jobs with outcome `cancelled`. Return `cancelled`, `finished` or `unknown` for each id.

        Raises:
            UnknownJob: an id is malformed.
            RequestTimeout: the service did not answer.
        """
        ids = (job_ids,) if isinstance(job_ids, str) else tuple(job_ids)
        check_job_ids(ids)
        until = self._service.until(timeout_s)
        fates: dict[str, str] = {}
        for start in range(0, len(ids), IDS_PER_REQUEST):
            reply: Cancelled = await self._service.ask(Cancel(new_id(), ids[start : start + IDS_PER_REQUEST]), until)
            fates.update(reply.jobs)
        return fates

    async def status(self, *, timeout_s: float | None = None) -> ServiceStatus:
        """Return the service's stage processes, queues and outcomes.

        Raises:
            RequestTimeout: the service did not answer.
        """
        reply: ServiceStatus = await self._service.ask(Status(new_id()), self._service.until(timeout_s))
        return reply

    async def nodes(self, *, timeout_s: float | None = None) -> NodeList:
        """List the nodes of the session's rollout broker, and the last ones that it lost.

        Raises:
            RequestTimeout: the service did not answer.
        """
        until = self._service.until(timeout_s)
        reply: NodeList = await self._service.ask(ListNodes(new_id()), until)
        found = reply.nodes
        while reply.more:
            reply = await self._service.ask(ListNodes(new_id(), found[-1].node), until)
            found += reply.nodes
        return replace(reply, nodes=found)

    async def trace(self, job_id: str, *, timeout_s: float | None = None) -> JobTrace:
        """Return a job's history: each state, where, how long, and the error that ended it.

        Args:
            job_id: its id, or a unique prefix.
            timeout_s: longest wait in seconds for the answer; None: the client's `timeout_s`.

        Raises:
            UnknownJob: no such job is known (any more), or several ids have this prefix.
            RequestTimeout: the service did not answer.
        """
        check_job_ids((job_id,))
        reply: JobTrace = await self._service.ask(Trace(new_id(), job_id), self._service.until(timeout_s))
        return reply

    async def open_batch(
        self,
        target_groups: int,
        group_size: int,
        *,
        keep: str | GroupFilter = "informative",
        carry: CarryOver = "running",
        weight: float = 1.0,
        max_staleness: int | None = None,
        max_replacements: int = 4,
        stop_early: bool = True,
        adopt: bool = True,
        max_given_up: int = 32,
        lease_s: float = 60.0,
        batch_id: str | None = None,
        timeout_s: float | None = None,
        model: str = POLICY,
        complete: Sequence[str] = (),
    ) -> AsyncBatch:
        """Request groups of rollouts as soon as possible: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).

        The service runs as many rollouts as its slots allow, prompt by prompt, until enough groups are kept. Rollouts
        still in flight continue in the session's next batch of the same group size.

        Args:
            target_groups: how many groups to keep.
            group_size: rollouts of each prompt.
            keep: which groups: `informative` (not all rewards equal), `all`, the result of `prorl_zmq.mean_reward`, or
                the name of a function that the service's environment registers as an entry point in
                `prorl_zmq.keep_policies`.
            carry: what of unneeded groups the next batch gets: `nothing`, `finished` rollouts, or `running` ones too.
            weight: its share of the slots, relative to other batches.
            max_staleness: most weight versions that a rollout's oldest token may be behind the current one; older
                rollouts are dropped, counted, and replaced. None: any number.
            max_replacements: most jobs of a group that may end without a reward, or without a record of `complete`, and
                be replaced; beyond it the group is given up, and `report.given_up` says why.
            stop_early: cancel the running jobs of a group that can no longer be kept.
            adopt: start with what earlier batches of this session carried over; False (as for an evaluation): without
                it.
            max_given_up: consecutive groups given up, with none completed between them, at which the batch fails.
            lease_s: seconds without a sign of life of this client after which the service stops its batches' jobs. A
                thread of the client renews the lease, however long the trainer computes.
            batch_id: its name, by which another client of this session can continue it; None: a new name.
            timeout_s: longest wait in seconds until it is open; None: the client's `timeout_s`.
            model: the `model` of its jobs.
            complete: records that each rollout must have with all rows that training needs, such as `("experts",
                "teacher")`; each job must ask for them. A rollout without one is replaced, with the reason
                `record_dropped`.

        Raises:
            InvalidBatch: an option (`field`) is invalid, or another batch has this name.
            Busy: too many batches are open.
            RequestTimeout: the service did not answer.
        """
        options = batch_options(
            keep,
            target_groups=target_groups,
            group_size=group_size,
            carry=carry,
            weight=weight,
            max_staleness=max_staleness,
            max_replacements=max_replacements,
            stop_early=stop_early,
            adopt=adopt,
            max_given_up=max_given_up,
            lease_s=lease_s,
            model=model,
            complete=tuple(complete),
        )
        until = self._service.until(timeout_s)
        name = batch_id if batch_id is not None else new_id()
        limit_bytes = (await self._service.hello(until)).job_limit_bytes
        progress = BatchProgress(self.session, name, options, limit_bytes)
        progress.opened(await self._service.ask(progress.open_request(), until))
        self._renew(lease_s)
        return AsyncBatch(self._service, name, progress)

    async def close(self) -> None:
        """Acknowledge collected results, release the others if the service answers within a second, and close."""
        if self._service.closed:
            return
        try:
            if self._keep_alive is not None:
                self._keep_alive.close()
            if self._service.welcome is not None:
                await self._collect(0, 0.0, timeout_s=1.0, goodbye=True)
            for model in tuple(self._holding):
                await self._release_weights(model)
        except ProrlError:
            pass  # unacknowledged results stay with the session, where its next client finds them
        finally:
            for model in tuple(self._holding):
                self._hold_no_more(model)
            self._service.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Requests ---------------------------------------------------------------------------------------------------------

    def _renew(self, lease_s: float) -> None:
        """Renew the session's lease from now on."""
        if self._keep_alive is None:
            renewal = partial(SessionAlive, session=self.session)
            place = (self._service.endpoint, self._service.keyring, self._service.find)
            self._keep_alive = KeepAlive(*place, renewal, lease_s)
            weakref.finalize(self._service, self._keep_alive.stop).atexit = False
        self._keep_alive.shorten(lease_s)

    async def _score(
        self, trajectories: Sequence[Trajectory], model: str, top: int, timeout_s: float | None, return_errors: bool
    ) -> list[Scores | ProrlError]:
        """Score trajectories in the client's session, which has no other jobs."""
        from ..score_jobs import IN_FLIGHT, ScoreJobs  # imports numpy, which commands without results do not need

        backends = await self.backends.list()
        served = [status.backend for status in backends]
        jobs = ScoreJobs(trajectories, model, top, served, keep_errors=return_errors)
        try:
            while not jobs.are_over:
                if part := jobs.take():
                    await self.submit(part)
                found = await self.collect(IN_FLIGHT, wait_s=timeout_s)
                if not found and timeout_s is not None:
                    raise RequestTimeout(f"no trajectory was scored for {timeout_s:g} s", timeout_s=timeout_s)
                for result in found:
                    jobs.receive(result)
        finally:
            if jobs.submitted:
                await self.cancel(jobs.submitted)
        return jobs.scores

    async def _submit(self, request: Submit, packed: list[bytes], until: float, busy_until: float) -> Accepted:
        while True:
            try:
                reply: Accepted = await self._service.ask(request, until, packed)
            except Busy as error:
                pause = float(error.fields.get("retry_after_s") or 1.0)
                if time.monotonic() + pause > busy_until:
                    raise
                await sleep(pause)
            else:
                return reply

    async def _collect(
        self, max_results: int, wait_s: float, timeout_s: float | None = None, *, goodbye: bool = False
    ) -> None:
        async with self._collect_turn:
            if self._collecting.waiting and max_results:
                return
            request = self._collecting.request(max_results, wait_s, goodbye=goodbye)
            self._collecting.receive(request, await self._service.ask_results(request, self._service.until(timeout_s)))
