"""Records of the batch sampler: sessions, batches, changes, and the actions that it returns."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from ...wire.messages.batches import BatchStatus
from .batch_stats import BatchStats, DiscardReason
from .group_filters import Verdict
from .rollout_group import RolloutGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ...wire.messages.batches import BatchClosed, BatchOptions, BatchReport, BatchState
    from .group_filters import KeepPolicy
    from .rollout_group import Rollout

    AsksFor = Callable[[Any, Sequence[str]], bool]
    """Whether a prompt's jobs ask for these records."""

CLOSED_LIMIT = 4
"""Most replies stored per session; its clients close no more batches at one time."""
NAMED_FAILURES = 3
"""Most failure reasons that a status lists."""


class Launch(NamedTuple):
    group_id: str
    job_id: str
    prompt: Any
    session: str


class CancelJobs(NamedTuple):
    """Cancel running jobs, which the sampler has already removed."""

    job_ids: tuple[str, ...]
    why: DiscardReason


class Discard(NamedTuple):
    """Finished rollouts that no client will get."""

    rollouts: tuple[Rollout, ...]
    why: DiscardReason


class Deliver(NamedTuple):
    """A group is kept and ready for its batch's client."""

    batch_id: str
    group: RolloutGroup


class GiveUp(NamedTuple):
    """A group cannot be completed; the batch's stats have the reasons."""

    batch_id: str
    group: RolloutGroup


class Ended(NamedTuple):
    batch_id: str
    state: BatchState


SamplerAction = Launch | CancelJobs | Discard | Deliver | GiveUp | Ended


class StartJobs(NamedTuple):
    """Submit jobs together, in one journal transaction."""

    launches: tuple[Launch, ...]


BatchAction = StartJobs | CancelJobs | Discard
"""The actions that the rollout broker performs, in its action queue."""


@dataclass(slots=True)
class SessionRecord:
    session: str
    heard_at: float
    lease_s: float
    prompts: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    """Prompts that earlier batches were fed and did not use, by model."""
    carried: dict[str, RolloutGroup] = field(default_factory=dict)
    """Groups without a batch, oldest first."""
    batches: set[str] = field(default_factory=set)
    closed: dict[str, BatchClosed] = field(default_factory=dict)
    """The last replies to requests that closed a batch, by request id."""

    def note_closed(self, reply: BatchClosed) -> None:
        """Store a reply in case it is lost on the way."""
        self.closed[reply.request_id] = reply
        while len(self.closed) > CLOSED_LIMIT:
            del self.closed[next(iter(self.closed))]


class RememberedBatch(NamedTuple):
    """Summary of a batch that was closed or whose session is gone."""

    status: BatchStatus
    report: BatchReport
    key: str
    model: str
    taken_over: tuple[str, ...]
    rollouts: int
    opened_at: float | None
    ended_at: float | None


@dataclass(slots=True)
class BatchRecord:
    batch_id: str
    session: str
    options: BatchOptions
    group_filter: KeepPolicy
    key: str
    """Prefix of the ids of its groups and jobs."""
    state: BatchState = "open"
    problem: str = ""
    fed: int = 0
    """Number of prompts fed."""
    stream_ended: bool = False
    """Whether no more prompts will be fed."""
    opened_at: float | None = None
    """None if an earlier process opened the batch."""
    ended_at: float | None = None
    """When the batch became met, short or failed."""
    began_at: float | None = None
    """When the batch got its first prompt, or a group of an earlier batch."""
    served_at: float | None = None
    """When the last group was sent to its client."""
    taken_over: list[str] = field(default_factory=list)
    """Ids of groups that earlier batches had begun."""
    taken_running: int = 0
    """Jobs of those groups that were running then."""
    opened: int = 0
    """Number of groups opened, which numbers them."""
    in_flight: int = 0
    stats: BatchStats = field(default_factory=BatchStats)
    prompts: deque[Any] = field(default_factory=deque)
    """Waiting prompts."""
    groups: dict[str, RolloutGroup] = field(default_factory=dict)
    """Groups in progress."""
    ready: dict[str, RolloutGroup] = field(default_factory=dict)
    """Kept groups that the client has not acknowledged."""
    due: list[tuple[bool, int, str]] = field(default_factory=list)
    """Heap of groups that may need jobs: groups decided to be kept first, then by age."""

    @property
    def model(self) -> str:
        """The model of its jobs."""
        return self.options.model

    @property
    def share(self) -> float:
        """Jobs in flight divided by the weight; the batch with the smallest share launches next."""
        return self.in_flight / self.options.weight

    def is_too_old(self, rollout: Rollout, now: Mapping[str, int]) -> bool:
        """Return whether a model's tokens are too old for the batch when `now` has the models' current versions."""
        limit = self.options.max_staleness
        if limit is None:
            return False
        oldest = ((self.model, rollout.version), *rollout.others)
        return any(version < now.get(model, 0) - limit for model, version in oldest)

    def lacks_record(self, rollout: Rollout) -> bool:
        """Return whether a rollout with tokens lacks a record, or a row of it, that the batch's rollouts must have."""
        return rollout.tokens > 0 and not {*self.options.complete}.issubset(rollout.records)

    def stale(self, now: Mapping[str, int]) -> Unusable:
        """Return the test for rollouts that are too old when `now` has the models' current versions."""
        return Unusable(lambda one: self.is_too_old(one, now), DiscardReason.STALE)

    def take_up(self, group: RolloutGroup) -> None:
        """Continue a group of an earlier process."""
        if not group.group_id.startswith(f"{self.key}."):
            self.taken_over.append(group.group_id)
        if group.is_complete:
            self.ready[group.group_id] = group
        else:
            self.groups[group.group_id] = group
            self.in_flight += len(group.running)
            self.put_due(group)

    def take_over(self, group: RolloutGroup) -> None:
        """Move one of the session's carried groups into this batch."""
        group.batch_id = self.batch_id
        group.verdict = Verdict.OPEN
        self.groups[group.group_id] = group
        self.taken_over.append(group.group_id)
        self.in_flight += len(group.running)
        self.taken_running += len(group.running)
        self.stats.adopted += len(group.running) + len(group.rollouts)

    def take_prompts(self, record: SessionRecord, asks: AsksFor) -> None:
        """Take over the session's unused prompts whose jobs ask for the records that the batch's rollouts must have."""
        if self.state != "open" or not self.options.adopt:
            return
        fitting: list[Any] = []
        others: deque[Any] = deque()
        for prompt in record.prompts.pop(self.model, ()):
            (fitting if self.may_take(prompt, asks) else others).append(prompt)
        self.prompts.extendleft(reversed(fitting))
        if others:
            record.prompts[self.model] = others

    def may_take(self, prompt: Any, asks: AsksFor) -> bool:
        return not self.options.complete or asks(prompt, self.options.complete)

    def leave_prompts(self, record: SessionRecord, fresh: list[Any], name_of: Callable[[Any], str]) -> list[Any]:
        """Return unused prompts to the session for its next batch, those of begun groups first.

        A batch that carries nothing and adopts nothing lists its unused prompts in its report instead; these are
        returned here, to be deleted.
        """
        unused = [*fresh, *self.prompts]
        self.prompts.clear()
        if self.options.carry == "nothing" and not self.options.adopt:
            self.stats.leave(map(name_of, unused))
            return unused
        self.stats.returned_prompts += len(unused)
        record.prompts[self.model].extendleft(reversed(unused))
        return []

    def fitting(self, carried: Iterable[RolloutGroup], asks: AsksFor) -> list[RolloutGroup]:
        if not self.options.adopt:
            return []
        kind = self.options.group_size, self.model
        of_kind = (group for group in carried if (group.size, group.model) == kind)
        return [group for group in of_kind if self.may_take(group.prompt, asks)]

    def open_group(self, prompt: Any, number: int) -> RolloutGroup:
        self.opened += 1
        size, model = self.options.group_size, self.model
        group = RolloutGroup(f"{self.key}.{self.opened}", prompt, size, number, self.session, self.batch_id, model)
        group.find_missing()
        self.groups[group.group_id] = group
        self.put_due(group)
        return group

    def put_due(self, group: RolloutGroup) -> None:
        """Queue a group that may need jobs or whose verdict changed."""
        if group.missing:
            heapq.heappush(self.due, (group.verdict != Verdict.KEEP, group.number, group.group_id))

    def next_due(self) -> RolloutGroup | None:
        while self.due:
            undecided, _, group_id = self.due[0]
            group = self.groups.get(group_id)
            if group is not None and group.missing and undecided == (group.verdict != Verdict.KEEP):
                return group
            heapq.heappop(self.due)
        return None

    def wanted_prompts(self, room: int) -> int:
        """Return how many more prompts the batch could use with room for `room` jobs."""
        if self.state != "open" or self.stream_ended:
            return 0
        return max(0, -(-room // self.options.group_size) - len(self.prompts))

    @property
    def rollouts(self) -> int:
        """Number of jobs that ran for the batch."""
        return self.stats.launched + self.taken_running

    def remembered(self, now: float) -> RememberedBatch:
        """Return the summary of a batch that is being closed."""
        return RememberedBatch(
            replace(self.status(), under_way=0, in_flight=0, prompts=0),
            self.stats.report(),
            self.key,
            self.model,
            tuple(self.taken_over),
            self.rollouts,
            self.opened_at,
            now if self.state == "open" else self.ended_at,
        )

    def status(self) -> BatchStatus:
        return BatchStatus(
            batch_id=self.batch_id,
            session=self.session,
            model=self.model,
            state=self.state,
            problem=self.problem,
            target_groups=self.options.target_groups,
            group_size=self.options.group_size,
            kept=self.stats.kept_groups,
            under_way=len(self.groups),
            in_flight=self.in_flight,
            prompts=len(self.prompts),
            dropped=self.stats.dropped_groups,
            failed=self.stats.failed,
            failures=dict(sorted(self.stats.failures.items(), key=lambda item: -item[1])[:NAMED_FAILURES]),
            given_up=self.stats.given_up_groups,
        )


class Unusable(NamedTuple):
    """A test for unusable rollouts, and the reason."""

    test: Callable[[Rollout], bool]
    why: DiscardReason


@dataclass(slots=True)
class Changes:
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    batches: dict[str, BatchRecord] = field(default_factory=dict)
    groups: dict[str, RolloutGroup] = field(default_factory=dict)
    gone_sessions: list[str] = field(default_factory=list)
    gone_batches: list[str] = field(default_factory=list)
    gone_groups: list[str] = field(default_factory=list)
    gone_prompts: list[Any] = field(default_factory=list)

    def session(self, record: SessionRecord) -> None:
        self.sessions[record.session] = record

    def batch(self, batch: BatchRecord) -> None:
        self.batches[batch.batch_id] = batch

    def group(self, group: RolloutGroup) -> None:
        self.groups[group.group_id] = group

    def forget_session(self, record: SessionRecord) -> None:
        """Record that a session is gone, with its waiting prompts."""
        self.sessions.pop(record.session, None)
        self.gone_sessions.append(record.session)
        self.gone_prompts += chain.from_iterable(record.prompts.values())

    def forget_batch(self, batch: BatchRecord) -> None:
        self.batches.pop(batch.batch_id, None)
        self.gone_batches.append(batch.batch_id)

    def forget_group(self, group: RolloutGroup, *, with_prompt: bool) -> None:
        self.groups.pop(group.group_id, None)
        self.gone_groups.append(group.group_id)
        if with_prompt:
            self.gone_prompts.append(group.prompt)
