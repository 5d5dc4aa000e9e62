"""`BatchProgress`: a client's state of a batch, which draws prompts on demand and returns each group once.

No sockets, no clock. A group is acknowledged with the request after it was returned; a group whose acknowledgement was
lost arrives a second time and is recognised by its id. Drawn prompts that were not accepted are kept for the next feed.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from ..errors import BatchFailed, InvalidBatch
from ..wire.messages.base import new_id
from ..wire.messages.batches import (
    BatchClosed,
    BatchOpened,
    BatchOptions,
    BatchReport,
    CarryOver,
    CloseBatch,
    Fed,
    Feed,
    GroupFilter,
    NextGroup,
    OpenBatch,
)
from ..wire.messages.jobs import Job
from .current_trace import in_current_trace
from .requests import pack_job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..data.group import Group
    from ..errors import ProrlError
    from ..wire.messages.batches import BatchStatus
    from .delivery import Delivery

log = logging.getLogger("prorl.client")

FEED_LIMIT = 512
"""Most prompts of one request."""
PAUSE_S = 1.0
FEED_BYTES = 32 * 2**20
"""Approximate limit of the prompts in one request."""


def mean_reward(
    low: float | None = None, high: float | None = None, *, least: float | None = None, most: float | None = None
) -> GroupFilter:
    """Keep groups whose mean reward is from `low` to `high`.

    Args:
        low: the smallest mean that is kept; None: any.
        high: the largest; None: any.
        least: the smallest possible reward; with `most`, groups are decided before their last rollout ends.
        most: the largest possible reward.
    """
    return GroupFilter("mean_reward", low, high, least, most)


def batch_options(keep: str | GroupFilter, **options: Any) -> BatchOptions:
    """Return checked options, or raise `InvalidBatch`."""
    if not isinstance(keep, str | GroupFilter):
        raise InvalidBatch(
            "keep is `all`, `informative`, what `mean_reward(low, high)` returns, or the name of a function that the "
            f"service's environment registers, not a {type(keep).__name__}",
            field="keep",
        )
    chosen = GroupFilter(keep) if isinstance(keep, str) else keep
    if options.get("carry") not in get_args(CarryOver):
        raise InvalidBatch(
            f"carry is one of {', '.join(get_args(CarryOver))}, not {options.get('carry')!r}", field="carry"
        )
    try:
        made = msgspec.convert({**options, "keep": msgspec.to_builtins(chosen)}, BatchOptions)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        raise InvalidBatch(f"{name or 'a batch'}: {what}", field=name) from error
    if made.keep.policy == "informative" and made.group_size < 2:
        raise InvalidBatch(
            f"`informative` keeps groups whose rewards differ, which those of {made.group_size} never do; ask for a "
            "group_size of 2 or more, or keep `all`",
            field="group_size",
        )
    return made


class BatchProgress:
    def __init__(self, session: str, batch_id: str, options: BatchOptions, job_limit_bytes: int) -> None:
        self._session = session
        self._batch_id = batch_id
        self._options = options
        self._job_limit_bytes = job_limit_bytes
        self._client_id = new_id()
        self._streams: deque[Iterator[Job]] = deque()
        self._more_to_come = True
        """More prompts will be fed after the last of `_streams`."""
        self._drawn: deque[tuple[Job, bytes]] = deque()
        """Prompts that the service has not accepted yet."""
        self._fed = 0
        self._told_last = False
        self._must_pause = False
        """The service was too busy for prompts: the next request waits for a group instead of requesting more."""
        self._handed_over: list[str] = []
        self._seen: set[str] = set()
        self.wanted = 0
        """Prompts that the service would accept now."""
        self.status: BatchStatus | None = None
        self.report: BatchReport | None = None
        self.has_ended = False
        """All groups were returned, and no more will come."""
        self._was_fed = False

    def check_failed(self) -> None:
        if self.status is not None and self.status.state == "failed":
            raise BatchFailed(f"batch {self._batch_id} ended: {self.status.problem}", batch_id=self._batch_id)

    def describe(self) -> str:
        status = self.status
        if status is None:
            return "nothing is known of the batch yet"
        parts = [
            f"{status.kept} of {status.target_groups} groups are kept, {status.dropped} were not",
            f"{status.under_way} are under way with {status.in_flight} jobs, {status.prompts} prompts wait",
        ]
        if status.problem:
            parts.append(status.problem)
        if status.failed:
            reasons = ", ".join(f"{reason} {count} times" for reason, count in status.failures.items())
            parts.append(f"{status.failed} jobs failed ({reasons}), and {status.given_up} groups were given up")
        return "; ".join(parts)

    def check_fed(self) -> None:
        """Raise `InvalidBatch` if no group can come because nothing was fed."""
        status = self.status
        if status is None or status.state != "open" or self._was_fed or self._fed:
            return
        if not (status.kept or status.under_way or status.prompts):
            raise InvalidBatch(f"batch {self._batch_id} has no prompts: call `feed` first", field="prompts")

    # Requests and replies ---------------------------------------------------------------------------------------------

    def open_request(self) -> OpenBatch:
        return OpenBatch(new_id(), self._session, self._batch_id, self._options)

    def opened(self, reply: BatchOpened) -> None:
        self._fed, self.wanted = reply.fed, reply.wanted

    def feed(self, prompts: Job | Iterable[Job], *, last: bool) -> None:
        if self.has_ended:
            state = self.status.state if self.status is not None else "closed"
            raise InvalidBatch(f"batch {self._batch_id} has ended ({state}); open another one", field="prompts")
        self._was_fed = True
        self._streams.append(iter(in_current_trace([prompts] if isinstance(prompts, Job) else prompts)))
        self._more_to_come = not last
        self._told_last = False

    def feed_request(self) -> tuple[Feed, list[bytes]] | None:
        """Draw the wanted prompts, and return the request that feeds them with the packed prompts; None: none to feed.

        Raises:
            JobTooLarge: a prompt is over the service's limit, and is skipped.
            MalformedMessage: a prompt has values other than plain data, and is skipped.
        """
        if not self.wanted:
            return None
        while self._streams and len(self._drawn) < min(self.wanted, FEED_LIMIT) and self._drawn_bytes() < FEED_BYTES:
            try:
                job = next(self._streams[0])
            except StopIteration:
                self._streams.popleft()
                continue
            self._drawn.append((job, self._packed(job)))
        last = not self._streams and not self._more_to_come
        if not self._drawn and (not last or self._told_last):
            return None
        header = Feed(new_id(), self._session, self._batch_id, self._fed, last=last)
        return header, [packed for _, packed in self._drawn]

    def fed(self, request: Feed, reply: Fed) -> None:
        for _ in range(min(reply.fed - request.start, len(self._drawn))):
            self._drawn.popleft()
        self._fed = reply.fed
        self.wanted = 0
        self._told_last = request.last

    def feed_later(self) -> None:
        """Keep the drawn prompts, since the service accepts none now."""
        self.wanted = 0
        self._must_pause = True

    def refused(self, error: ProrlError) -> None:
        """Drop the prompt that the error names, if any; the others are fed with the next request."""
        place = error.fields.get("place")
        if isinstance(place, int) and place < len(self._drawn):
            del self._drawn[place]

    def group_request(self, wait_s: float) -> NextGroup:
        pause, self._must_pause = self._must_pause, False
        if self.status is None and not (self._was_fed or self._fed):
            wait_s = 0.0  # find out first whether anything can come (see `check_fed`)
        has_more = bool(self._streams or self._drawn) or not (self._more_to_come or self._told_last)
        return NextGroup(
            new_id(),
            self._session,
            self._batch_id,
            self._client_id,
            tuple(self._handed_over),
            feeds=has_more and not pause,
            wait_s=min(wait_s, PAUSE_S) if pause else wait_s,
        )

    def receive(self, request: NextGroup, delivery: Delivery) -> Group | None:
        """Return the group of a reply; None: it has none, or one that was returned before or cannot be read.

        A group with an unreadable trajectory is acknowledged all the same: it would never become readable, and its NaN
        reward would spoil the advantages of the others.
        """
        reply = delivery.reply
        acknowledged = set(request.acknowledge)
        self._handed_over = [group_id for group_id in self._handed_over if group_id not in acknowledged]
        self.status, self.wanted = reply.batch, reply.wanted
        self.report, self.has_ended = reply.report, reply.ended
        if not reply.group_id:
            return None
        from ..data.group import Group  # imports numpy, which commands without batches do not need

        group = Group(reply.group_id, reply.prompt_id, tuple(one for one, _ in delivery.trajectories()))
        self._handed_over.append(group.group_id)
        if group.group_id in self._seen:
            return None
        self._seen.add(group.group_id)
        if unread := [one.job_id for one in group.trajectories if one.reward is None]:
            log.error("group %s is lost: the trajectories of its jobs %s cannot be read", group.group_id, unread)
            return None
        return group

    def close_request(self) -> CloseBatch:
        return CloseBatch(new_id(), self._session, self._batch_id, tuple(self._handed_over))

    def closed(self, reply: BatchClosed) -> None:
        self.status, self.report = reply.batch, reply.report

    def _packed(self, job: Job) -> bytes:
        if not isinstance(job, Job):
            raise TypeError(f"prompts are `Job`s, the templates of their groups' jobs; one is a {type(job).__name__}")
        return pack_job(job, self._job_limit_bytes, "prompt")

    def _drawn_bytes(self) -> int:
        return sum(len(packed) for _, packed in self._drawn)
