# Generated from ../asynchronous/batch.py by `make client`; do not edit.
"""`Batch`: a trainer's request for k groups whose rewards differ.

    with client.open_batch(target_groups=32, group_size=8) as batch:
        batch.feed(prompts)
        for group in batch:
            learn(group)

The service runs as many rollouts as its slots allow, draws prompts as it needs them, and stops when it has enough
groups; the session's next batch continues the rollouts in flight.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from ...errors import Busy, Closed, ProrlError, RequestTimeout
from ..requests import POLL_S
from .transport import Lock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ...data.group import Group
    from ...wire.messages.batches import BatchReport, BatchState, BatchStatus
    from ...wire.messages.jobs import Job
    from ..batch_progress import BatchProgress
    from .connection import ServiceConnection


class Batch:
    """An open batch, from `RolloutClient.open_batch`. Closing it carries over its rollouts in flight."""

    def __init__(self, service: ServiceConnection, batch_id: str, progress: BatchProgress) -> None:
        self.batch_id = batch_id
        self._service = service
        self._progress = progress
        self._turn = Lock()
        self._closed = False

    @property
    def state(self) -> BatchState:
        """`open`; `met`; `short`: the stream of prompts ended before the target; `failed`: see `next_group`."""
        return self._progress.status.state if self._progress.status is not None else "open"

    @property
    def status(self) -> BatchStatus | None:
        """The progress as of the last reply; None before the first."""
        return self._progress.status

    @property
    def report(self) -> BatchReport | None:
        """Counters as of the last reply: jobs, unused ones by reason, kept and dropped rollouts; None before."""
        return self._progress.report

    def feed(self, prompts: Job | Iterable[Job], *, last: bool = True) -> None:
        """Feed prompts: jobs that are templates of their groups' (the `job_id` is the prompt's id).

        `next_group` draws them as the service needs them, so the iterable may be endless. May be called more than once.

        Args:
            prompts: any iterable, or one prompt.
            last: these are the last prompts of the batch; False: more will be fed.
        """
        self._progress.feed(prompts, last=last)

    def next_group(self, timeout_s: float | None = None) -> Group | None:
        """Wait for a kept group; None: the batch has ended, and all its groups were returned (see `state`).

        A group is acknowledged by the next call, or by `close`.

        Args:
            timeout_s: longest wait in seconds, after which the batch stays open; None: no limit, as jobs have theirs.

        Raises:
            BatchFailed: the keep policy raised, or `max_given_up` consecutive groups could not be completed.
            InvalidBatch: nothing was fed, so no group can come.
            Closed: this batch was closed here.
            UnknownBatch: the batch was closed, or its lease (`lease_s`) expired.
            InvalidJob, UnknownTask, JobTooLarge: a prompt is invalid for this service; it is skipped, and the next call
                continues with the others.
            RequestTimeout: there was none in time, or the service did not answer.
        """
        if self._closed:
            raise Closed(f"the batch {self.batch_id} was closed")
        until = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        progress = self._progress
        with self._turn:
            while not progress.has_ended:
                self._feed_wanted()
                wait_s = max(0.0, min(POLL_S, until - time.monotonic()))
                request = progress.group_request(wait_s)
                group = progress.receive(request, self._service.ask_results(request, self._service.until()))
                if group is not None:
                    return group
                progress.check_fed()
                if time.monotonic() >= until and not progress.has_ended:
                    raise RequestTimeout(f"no group within {timeout_s:g} s; {progress.describe()}", timeout_s=timeout_s)
            progress.check_failed()
            return None

    def __iter__(self) -> Iterator[Group]:
        """Yield groups until the batch has ended."""
        while (group := self.next_group()) is not None:
            yield group

    def close(self) -> None:
        """End the batch, acknowledge returned groups, and carry over the rest as `carry` says. Idempotent.

        Raises:
            UnknownBatch: another client has closed it, or its lease has expired.
            RequestTimeout: the service did not answer.
        """
        if not self._closed:
            self._closed = True
            request = self._progress.close_request()
            self._progress.closed(self._service.ask(request, self._service.until()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(ProrlError):  # keep the first error; the lease ends the batch
            self.close()

    def _feed_wanted(self) -> None:
        made = self._progress.feed_request()
        if made is None:
            return
        request, prompts = made
        try:
            self._progress.fed(request, self._service.ask(request, self._service.until(), prompts))
        except Busy:
            self._progress.feed_later()
        except ProrlError as error:
            self._progress.refused(error)
            raise
