# Generated from ../asynchronous/endpoint.py by `make client`; do not edit.
"""`Endpoint`: one rollout led by the user's program, at an OpenAI-style address.

    with client.endpoint(job) as rollout:
        agent = MyAgent(openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key))
        trajectory = rollout.finish(reward=score(agent.run()))

The rollout is a job: it waits for a RUN slot, occupies it until its end, and returns its trajectory to the opener. The
program calls the RUN process directly, so it must be on that machine; programs elsewhere use the gateway.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from ...errors import EndpointFailed, JobsLost, ProrlError, RequestTimeout, from_info
from ...wire.messages.base import new_id
from ...wire.messages.front_door import Cancel, Collect, Trace
from ..outside_calls import GONE, ask, check_reward, is_over, reached_at, with_key
from ..requests import POLL_S
from .transport import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...data.trajectory import Trajectory
    from ...wire.messages.front_door import JobTrace
    from ...wire.messages.jobs import Job, TrainOn
    from ..delivery import CollectState
    from .connection import ServiceConnection


class Endpoint:
    """A rollout whose model an outside program calls; made by `RolloutClient.endpoint`, entered with `with`.

    Entering submits the job and waits until a RUN process accepts the program's calls. Leaving cancels an unfinished
    rollout. A rollout is tried once, since the service cannot restart your program. If it is lost, or the program is
    silent for longer than `idle_s`, its trajectory says so (`outcome`, `error`).

    Args:
        job: the task, with the sampling and the limits that apply whatever the program requests. `limits.run_s` is the
            longest time of the whole rollout. Its `max_attempts` counts as 1.
        idle_s: longest time in seconds without a call of the program.
        train_on: which of the program's calls are in the trajectory, by kind (see `Harness.train_on`).
        timeout_s: longest wait for a RUN process in seconds; None: as long as the job waits in its queue.

    Raises:
        RequestTimeout: no RUN process had a free slot in time (the job is cancelled), or the service did not answer.
        EndpointFailed: the address cannot be reached from here.
        ProrlError: what `RolloutClient.submit` raises, or what ended the job before the program could begin.
    """

    def __init__(
        self,
        submit: Callable[[Job], Any],
        service: ServiceConnection,
        collecting: CollectState,
        job: Job,
        idle_s: float,
        train_on: TrainOn,
        timeout_s: float | None,
    ) -> None:
        self.job, self.api_key = with_key(job, idle_s, train_on)
        self.base_url = ""
        """The model's base URL, for OpenAI's and Anthropic's clients; set inside the `with` block."""
        self._submit = submit
        self._service = service
        self._collecting = collecting
        self._timeout_s = timeout_s
        self._client_id = new_id()
        self._trajectory: Trajectory | None = None

    @property
    def job_id(self) -> str:
        """The rollout's job, for `prorl job` and the dashboard."""
        return self.job.job_id

    def __enter__(self) -> Self:
        self._collecting.set_aside(self.job_id)
        try:
            self._submit(self.job)
        except BaseException:
            self._collecting.forget_aside(self.job_id)
            raise
        try:
            self.base_url = self._opened()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._leave()
        except ProrlError:
            if kind is None:
                raise

    def finish(self, reward: float | None = None, *, timeout_s: float | None = None) -> Trajectory:
        """End the rollout, and return its trajectory after judging.

        Calls in progress have one more second. If the rollout has already ended otherwise (a limit, a lost process),
        this returns that trajectory.

        Args:
            reward: the program's reward: a finite number, which replaces the task's EVAL. None: EVAL judges; the task
                `outside` has none.
            timeout_s: longest wait in seconds for the trajectory; None: no limit, since EVAL has its own.

        Raises:
            EndpointFailed: the reward is not a finite number, the task cannot judge, no call of the model was answered,
                or the rollout was ended with another reward (`status` 400 or 409). The rollout is unchanged.
            JobsLost: the rollout broker was restarted without its journal.
            RequestTimeout: there was no trajectory in time, or the service did not answer.
        """
        check_reward(reward)
        if self._trajectory is None:
            try:
                answer = in_thread(ask, "POST", f"{self.base_url}/finish", self.api_key, {"reward": reward})
            except OSError:
                pass  # the process is gone; the trajectory has the error
            else:
                is_over(answer)
        return self.trajectory(timeout_s=timeout_s)

    def cancel(self) -> Trajectory:
        """End the rollout as `cancelled`, and return its trajectory, which has no tokens."""
        if self._trajectory is None:
            self._service.ask(Cancel(new_id(), (self.job_id,)), self._service.until())
        return self.trajectory(timeout_s=None)

    def trajectory(self, *, timeout_s: float | None = None) -> Trajectory:
        """Wait until the rollout has ended for any reason, and return its trajectory.

        Raises:
            JobsLost: the rollout broker was restarted without its journal.
            RequestTimeout: it did not end in time, or the service did not answer.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._trajectory is None:
            left_s = POLL_S if until is None else until - time.monotonic()
            if left_s <= 0:
                raise RequestTimeout(f"rollout {self.job_id} did not end in {timeout_s:g} s", timeout_s=timeout_s)
            self._collect(min(left_s, POLL_S))
        return self._trajectory

    def _collect(self, wait_s: float) -> None:
        """Request the trajectory; a `collect` of the same client may have received it and put it aside."""
        names = (self._collecting.session, self._client_id)
        request = Collect(new_id(), *names, max_results=1, wait_s=wait_s, job_ids=(self.job_id,))
        self._collecting.receive(request, self._service.ask_results(request, self._service.until()))
        self._trajectory = self._collecting.aside(self.job_id)
        if self._trajectory is None and self._collecting.is_lost(self.job_id):
            raise JobsLost(
                f"rollout {self.job_id} is gone: the rollout broker was restarted without the journal that had it",
                count=1,
                job_ids=self.job_id,
            )

    def _opened(self) -> str:
        """Wait for a RUN process, and return the URL at which it accepts the program's calls."""
        until = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            left_s = POLL_S if until is None else max(0.0, until - time.monotonic())
            wait_s = min(left_s, POLL_S)
            request = Trace(new_id(), self.job_id, self._collecting.session, wait_s)
            trace: JobTrace = self._service.ask(request, self._service.until() + wait_s, held_s=wait_s)
            if trace.address:
                break
            if trace.outcome is not None:
                raise self._ended_before()
            if until is not None and time.monotonic() >= until:
                raise RequestTimeout(
                    f"no RUN process had a free slot for rollout {self.job_id} within {self._timeout_s:g} s",
                    timeout_s=self._timeout_s,
                )
        url = reached_at(trace)
        try:
            answer = in_thread(ask, "GET", f"{url}/models", self.api_key, None)
        except OSError as error:
            words = f"the address {url} of rollout {self.job_id} cannot be reached from here: {error}"
            raise EndpointFailed(words, status=0) from None
        if is_over(answer):
            raise self._ended_before()
        return url

    def _ended_before(self) -> ProrlError:
        """Return the error that ended the job before its program could begin."""
        ended = (self.trajectory()).error
        return from_info(ended) if ended is not None else EndpointFailed("the rollout has ended", status=GONE)

    def _leave(self) -> None:
        """Cancel an unfinished rollout, and acknowledge the trajectory."""
        try:
            if self._trajectory is None:
                self.cancel()
            names = (self._collecting.session, self._client_id)
            done = Collect(new_id(), *names, (self.job_id,), max_results=0, goodbye=True)
            self._service.ask_frames(done, self._service.until())
        finally:
            self._collecting.forget_aside(self.job_id)
