"""`BatchSampler`: chooses which jobs to run so that each batch soon has k groups that its policy keeps. Pure.

Events and the time go in, actions come out. A session feeds prompts; a batch takes them in order, and each prompt
becomes a group of `group_size` jobs.

- **Replenishment**: `launch` fills free room whenever a job ends. Groups decided to be kept come first, then the oldest
  group, then a new prompt.
- **Early termination**: once `target_groups` are kept, the batch is met and no longer needs its other groups.
- **Carry-over**: the session's next batch of that group size continues them: finished rollouts, and with
  `carry="running"` running jobs too. Carried groups are the oldest, so long ones are late but never left out. With
  `carry="nothing"` only the prompt is carried (see `BatchRecord.leave_prompts`). What does not ask for the records of
  `complete` stays in the session.
- **Staleness**: rollouts with tokens older than `max_staleness` weight versions of their model are dropped and
  replaced. If they were too old when they began, their engine never had the announced weights: a failure.
- **Failures**: a job without a reward, or without a record of `complete`, is replaced, up to `max_replacements` per
  group; then the group is given up. No rollout is duplicated to fill a place.

Of several batches, the one with the fewest jobs in flight for its weight launches next.

    event                          open                                    met, short, failed
    -----------------------------  --------------------------------------  ---------------------------------------
    group complete, kept           Deliver; the target is reached → met    (its groups have left it)
    group complete, not kept       Discard
    no prompt, no group under way  → short, if the stream has ended
    policy raises                  → failed
    new weights                    Discard what is stale of its groups     the same of those not given yet: → open
    close                          Cancel or carry its jobs; forgotten     forgotten; groups not fetched are carried
    lease over                     Cancel, Discard; its session forgotten  its session forgotten

`take_changes` and `restore` serve the journal. The sampler does not read what rollouts and prompts contain.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any

from ...errors import InvalidBatch
from ...wire.messages.base import POLICY
from .batch_records import (
    BatchRecord,
    CancelJobs,
    Changes,
    Deliver,
    Discard,
    Ended,
    GiveUp,
    Launch,
    SessionRecord,
    Unusable,
)
from .batch_registry import BatchRegistry
from .batch_stats import DiscardReason, described_failures
from .group_filters import Verdict, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ...wire.messages.batches import BatchClosed, BatchOptions, BatchState
    from .batch_records import AsksFor, SamplerAction
    from .group_filters import KeepPolicy
    from .rollout_group import Rollout, RolloutGroup


class BatchSampler:
    def __init__(
        self,
        name_of: Callable[[Any], str] = str,
        worked_s: Callable[[str, float], float] = lambda _, __: 0.0,
        asks: AsksFor = lambda _, __: True,
    ) -> None:
        self._name_of, self._worked_s = name_of, worked_s
        self.registry = BatchRegistry(asks)
        self._sessions, self._batches = self.registry.sessions, self.registry.batches
        self._owners: dict[str, RolloutGroup] = {}
        """The group of each running job."""
        self._number, self._now = 0, 0.0
        self._actions: list[SamplerAction] = []
        self._changes = Changes()

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._owners

    # What outlives the sampler ----------------------------------------------------------------------------------------

    def take_changes(self) -> Changes:
        changes, self._changes = self._changes, Changes()
        return changes

    def restore(
        self,
        sessions: Iterable[SessionRecord],
        batches: Iterable[BatchRecord],
        groups: Iterable[RolloutGroup],
        versions: Mapping[str, int],
        now: float,
    ) -> list[SamplerAction]:
        """Restore an earlier sampler's state before any event; leases start over."""
        self._now = now
        self.registry.restore(sessions, batches, versions)
        for group in sorted(groups, key=lambda group: group.number):
            self._number = max(self._number, group.number)
            self._owners.update(dict.fromkeys(group.running, group))
            group.find_missing()
            home = self._batches.get(group.batch_id)
            if home is None:
                group.batch_id = ""
                self._sessions[group.session].carried[group.group_id] = group
            else:
                home.take_up(group)
                if not group.is_complete:
                    self._judge(home, group)
        for batch in self._batches.values():
            self._end_if_short(batch)
        return self._take_actions()

    # Events -----------------------------------------------------------------------------------------------------------

    def open(
        self, session: str, batch_id: str, options: BatchOptions, group_filter: KeepPolicy, now: float, key: str = ""
    ) -> list[SamplerAction]:
        """Open a batch, which takes over the session's carried groups of its group size.

        Raises:
            InvalidBatch: the id is in use, or the policy can keep no group of that size.
        """
        if batch_id in self._batches:
            raise InvalidBatch(f"a batch {batch_id} is open already; ids must be unique", field="batch_id")
        group_filter.check(options.group_size)
        self._now = now
        record = self._sessions.setdefault(session, SessionRecord(session, now, options.lease_s))
        record.heard_at = now
        record.batches.add(batch_id)
        batch = BatchRecord(batch_id, session, options, group_filter, key or batch_id, opened_at=now)
        self._batches[batch_id] = batch
        record.lease_s = max(self._batches[name].options.lease_s for name in record.batches)
        self._changes.session(record)
        self._changes.batch(batch)
        self._adopt_carried(batch, record)
        return self._take_actions()

    def feed(self, batch_id: str, prompts: Iterable[Any], now: float, *, last: bool = False) -> list[SamplerAction]:
        """Add prompts to a batch; `last` ends its stream.

        Raises:
            UnknownBatch: the batch is not open.
        """
        self._now = now
        batch = self.registry.batch(batch_id)
        record = self._sessions[batch.session]
        record.heard_at = now
        new = list(prompts)
        (batch.prompts if batch.state == "open" else record.prompts[batch.model]).extend(new)
        batch.fed += len(new)
        batch.stream_ended = last
        self._changes.batch(batch)
        self._end_if_short(batch)
        return self._take_actions()

    def launch(self, may_start: Callable[[Any], bool], now: float) -> list[SamplerAction]:
        self._now = now
        turns = [(batch.share, batch.batch_id) for batch in self._batches.values() if batch.state == "open"]
        heapq.heapify(turns)
        while turns:
            batch = self._batches[turns[0][1]]
            group = batch.next_due()
            prompts = batch.prompts
            if (group is None and not prompts) or not may_start(prompts[0] if group is None else group.prompt):
                heapq.heappop(turns)
                continue
            self._start(batch, self._open_group(batch, prompts.popleft()) if group is None else group)
            heapq.heapreplace(turns, (batch.share, batch.batch_id))
        return self._take_actions()

    def job_completed(self, rollout: Rollout, now: float) -> list[SamplerAction]:
        self._now = now
        group = self._owners.pop(rollout.job_id, None)
        if group is None:
            return [Discard((rollout,), DiscardReason.NOT_NEEDED)]
        if not math.isfinite(rollout.reward):
            self._lose(group, rollout.job_id, "reward_not_finite")
            return self._take_actions()
        batch = self._batches.get(group.batch_id)
        why = None
        if batch is not None and batch.is_too_old(rollout, group.started_with.get(rollout.job_id, {})):
            why, reason = DiscardReason.STALE, "older_weights_than_announced"
        elif batch is not None and batch.lacks_record(rollout):
            why = reason = DiscardReason.UNRECORDED
        if why is not None:
            self._waste(batch, why, [rollout.seconds])
            self._actions.append(Discard((rollout,), why))
            self._lose(group, rollout.job_id, reason)
            return self._take_actions()
        group.rollouts[group.running.pop(rollout.job_id)] = rollout
        self._changes.group(group)
        if batch is not None:
            batch.in_flight -= 1
            batch.stats.completed += 1
            self._changes.batch(batch)
            self._drop(group, batch, batch.stale(self.registry.versions))
            self._judge(batch, group)
            self._end_if_short(batch)
        return self._take_actions()

    def not_started(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            group = self._owners.pop(job_id)
            group.missing.append(group.running.pop(job_id))
            batch = self._batches[group.batch_id]
            batch.in_flight -= 1
            batch.stats.launched -= 1
            batch.put_due(group)

    def job_failed(self, job_id: str, reason: str, now: float) -> list[SamplerAction]:
        self._now = now
        group = self._owners.pop(job_id, None)
        if group is not None:
            self._lose(group, job_id, reason)
        return self._take_actions()

    def set_version(self, version: int, now: float, model: str = POLICY) -> list[SamplerAction]:
        """Record new weights of a model and drop its rollouts that are now too old."""
        self._now = now
        self.registry.set_version(model, version)
        for batch in self._batches.values():
            not_given = [group for group in batch.ready.values() if not group.given_to]
            self._drop_of(batch, not_given, batch.stale(self.registry.versions))
        return self._take_actions()

    def rollout_lost(self, job_id: str, now: float) -> list[SamplerAction]:
        """Replace a rollout whose trajectory was lost before its client received it."""
        self._now = now
        lost = Unusable(lambda rollout: rollout.job_id == job_id, DiscardReason.LOST)
        for batch in self._batches.values():
            self._drop_of(batch, batch.ready.values(), lost)
        return self._take_actions()

    def acknowledge(self, batch_id: str, group_ids: Iterable[str]) -> list[RolloutGroup]:
        """Remove acknowledged groups of a batch; return those not acknowledged before."""
        batch = self.registry.batch(batch_id)
        groups = [batch.ready.pop(group_id) for group_id in dict.fromkeys(group_ids) if group_id in batch.ready]
        for group in groups:
            self._changes.forget_group(group, with_prompt=True)
        return groups

    def mark_given(self, group: RolloutGroup, client_id: str, now: float) -> None:
        """Record that a group was sent to a client; new weights no longer make it stale."""
        batch = self._batches.get(group.batch_id)
        if not group.given_to and batch is not None:
            batch.stats.kept.add(group.rollouts.values(), self.registry.version(group.model))
            batch.served_at = now
            self._changes.batch(batch)
        group.given_to, group.given_at = client_id, now
        self._changes.group(group)

    def close(self, batch_id: str, now: float) -> list[SamplerAction]:
        """Close a batch; carry over its groups in progress and those that its client has not acknowledged.

        Raises:
            UnknownBatch: the batch is not open.
        """
        self._now = now
        batch = self.registry.batch(batch_id)
        record = self._sessions[batch.session]
        record.heard_at = now
        for group in batch.ready.values():
            group.given_to = ""
            batch.groups[group.group_id] = group
        batch.ready = {}
        self._let_go(batch)
        record.batches.discard(batch_id)
        self.registry.remove(batch_id, now)
        self._changes.forget_batch(batch)
        return self._take_actions()

    def note_closed(self, session: str, reply: BatchClosed) -> None:
        """Store the reply to a request that closed a batch, for a resent request."""
        self._sessions[session].note_closed(reply)
        self._changes.session(self._sessions[session])

    def close_session(self, session: str, now: float) -> list[SamplerAction]:
        """Cancel a session's jobs and remove the session with all its batches."""
        self._now = now
        record = self._sessions.pop(session, None)
        if record is None:
            return []
        for batch_id in sorted(record.batches):
            batch = self.registry.remove(batch_id, now)
            record.prompts[batch.model] += batch.prompts
            for group in (*batch.groups.values(), *batch.ready.values()):
                self._abandon(group, DiscardReason.ABANDONED)
            self._changes.forget_batch(batch)
        for group in record.carried.values():
            self._abandon(group, DiscardReason.ABANDONED)
        self._changes.forget_session(record)
        return self._take_actions()

    def tick(self, now: float) -> list[SamplerAction]:
        """Close sessions whose leases have expired."""
        return [action for session in self.registry.silent_sessions(now) for action in self.close_session(session, now)]

    # Groups -----------------------------------------------------------------------------------------------------------

    def _open_group(self, batch: BatchRecord, prompt: Any) -> RolloutGroup:
        self._number += 1
        return batch.open_group(prompt, self._number)

    def _start(self, batch: BatchRecord, group: RolloutGroup) -> None:
        job_id = group.start()
        group.started_with[job_id] = self.registry.versions
        batch.in_flight += 1
        batch.stats.launched += 1
        self._owners[job_id] = group
        self._changes.group(group)
        self._changes.batch(batch)
        self._actions.append(Launch(group.group_id, job_id, group.prompt, batch.session))

    def _adopt_carried(self, batch: BatchRecord, record: SessionRecord) -> None:
        batch.take_prompts(record, self.registry.asks)
        for group in batch.fitting(record.carried.values(), self.registry.asks):
            if batch.state == "open":
                del record.carried[group.group_id]
                self._adopt(batch, group)

    def _adopt(self, batch: BatchRecord, group: RolloutGroup) -> None:
        batch.take_over(group)
        self._changes.group(group)
        self._drop(group, batch, batch.stale(self.registry.versions))
        self._drop(group, batch, Unusable(batch.lacks_record, DiscardReason.UNRECORDED))
        batch.put_due(group)
        if group.is_complete or not self._give_up_if_hopeless(batch, group):
            self._judge(batch, group)

    def _judge(self, batch: BatchRecord, group: RolloutGroup) -> None:
        """Update a group's verdict after its rollouts changed."""
        try:
            verdict = batch.group_filter.verdict(group.rewards, group.size, group.role_rewards)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a policy is a user's code
            self._end(batch, "failed", failure_of(error))
            return
        if verdict != group.verdict:
            group.verdict = verdict
            batch.put_due(group)
        if group.is_complete:
            batch.stats.given_up_in_row = 0
            del batch.groups[group.group_id]
            if verdict == Verdict.KEEP:
                self._keep(batch, group)
            else:
                batch.stats.drop(group.rollouts.values(), self.registry.version(group.model))
                self._abandon(group, DiscardReason.NOT_KEPT)
        elif verdict == Verdict.DROP:
            if batch.options.stop_early or not group.running:
                self._remove(batch, group, DiscardReason.NOT_KEPT)
            else:
                group.missing.clear()

    def _keep(self, batch: BatchRecord, group: RolloutGroup) -> None:
        batch.ready[group.group_id] = group
        batch.stats.kept_groups += 1
        self._changes.group(group)
        self._changes.batch(batch)
        self._actions.append(Deliver(batch.batch_id, group))
        if batch.stats.kept_groups == batch.options.target_groups:
            self._end(batch, "met")

    def _take_back(self, batch: BatchRecord, group: RolloutGroup) -> None:
        """Continue a kept group that lost rollouts before its client received it."""
        del batch.ready[group.group_id]
        batch.groups[group.group_id] = group
        group.given_to = ""
        batch.stats.kept_groups -= 1
        if batch.state != "failed":
            batch.state = "open"
            self._adopt_carried(batch, self._sessions[batch.session])
        self._changes.batch(batch)
        self._judge(batch, group)
        batch.put_due(group)

    def _lose(self, group: RolloutGroup, job_id: str, reason: str) -> None:
        """Replace a job that produced no rollout, or give up its group."""
        group.missing.append(group.running.pop(job_id))
        group.failures[reason] += 1
        self._changes.group(group)
        batch = self._batches.get(group.batch_id)
        if batch is None:
            return
        batch.in_flight -= 1
        batch.stats.fail(reason)
        self._changes.batch(batch)
        if not self._give_up_if_hopeless(batch, group):
            if group.verdict != Verdict.DROP:
                batch.put_due(group)
            elif not group.running:
                self._remove(batch, group, DiscardReason.NOT_KEPT)
        self._end_if_short(batch)

    def _give_up_if_hopeless(self, batch: BatchRecord, group: RolloutGroup) -> bool:
        if group.failures.total() <= batch.options.max_replacements:
            return False
        batch.stats.give_up(self._name_of(group.prompt), dict(group.failures))
        self._remove(batch, group, DiscardReason.GIVEN_UP)
        self._actions.append(GiveUp(batch.batch_id, group))
        in_row = batch.stats.given_up_in_row
        if batch.state == "open" and in_row >= batch.options.max_given_up:
            reasons = described_failures(batch.status().failures)
            self._end(batch, "failed", f"{in_row} groups in a row could not be completed: {reasons}")
        return True

    def _remove(self, batch: BatchRecord, group: RolloutGroup, why: DiscardReason) -> None:
        """Remove an incomplete group from its batch."""
        del batch.groups[group.group_id]
        batch.in_flight -= len(group.running)
        self._waste(batch, why, [rollout.seconds for rollout in group.rollouts.values()])
        self._abandon(group, why)

    def _abandon(self, group: RolloutGroup, why: DiscardReason, *, with_prompt: bool = True) -> None:
        """Cancel a group's running jobs, discard its rollouts, and remove the group."""
        self._cancel(group, why)
        if group.rollouts:
            self._actions.append(Discard(tuple(group.rollouts.values()), why))
            group.rollouts = {}
        self._changes.forget_group(group, with_prompt=with_prompt)

    def _cancel(self, group: RolloutGroup, why: DiscardReason) -> None:
        stopped = group.stop()
        for job_id in stopped:
            del self._owners[job_id]
        if stopped:
            seconds = [self._worked_s(job_id, self._now) for job_id in stopped]
            self._waste(self._batches.get(group.batch_id), why, seconds)
            self._actions.append(CancelJobs(tuple(stopped), why))

    def _drop_of(self, batch: BatchRecord, kept: Iterable[RolloutGroup], unusable: Unusable) -> None:
        """Drop unusable rollouts of a batch's groups in progress and of the given kept groups."""
        for group in (*batch.groups.values(), *kept):
            if self._drop(group, batch, unusable):
                (self._take_back if group.group_id in batch.ready else self._judge)(batch, group)

    def _drop(self, group: RolloutGroup, batch: BatchRecord, unusable: Unusable) -> bool:
        """Drop unusable rollouts of a group; return whether any were dropped, so the group must be judged again."""
        dropped = group.drop(unusable.test)
        if dropped:
            self._changes.group(group)
            self._waste(batch, unusable.why, [rollout.seconds for rollout in dropped])
            self._actions.append(Discard(dropped, unusable.why))
            batch.put_due(group)
        return bool(dropped)

    def _waste(self, batch: BatchRecord | None, why: DiscardReason, seconds: list[float]) -> None:
        if batch is not None and seconds:
            batch.stats.waste(why, seconds)
            self._changes.batch(batch)

    # The end of a batch -----------------------------------------------------------------------------------------------

    def _end_if_short(self, batch: BatchRecord) -> None:
        if batch.state == "open" and batch.stream_ended and not batch.prompts and not batch.groups:
            self._end(batch, "short")

    def _end(self, batch: BatchRecord, state: BatchState, problem: str = "") -> None:
        batch.state, batch.problem, batch.ended_at = state, problem, self._now
        self._changes.batch(batch)
        self._let_go(batch)
        self._actions.append(Ended(batch.batch_id, state))

    def _let_go(self, batch: BatchRecord) -> None:
        """Carry over a batch's groups in progress, as its options say."""
        record = self._sessions[batch.session]
        fresh: list[Any] = []
        for group in batch.groups.values():
            unwanted = group.verdict == Verdict.DROP and not group.is_complete
            if batch.options.carry == "nothing" or unwanted:
                self._waste(batch, DiscardReason.NOT_NEEDED, [rollout.seconds for rollout in group.rollouts.values()])
                self._abandon(group, DiscardReason.NOT_NEEDED, with_prompt=unwanted)
                if not unwanted:
                    fresh.append(group.prompt)
                continue
            if batch.options.carry == "finished":
                self._cancel(group, DiscardReason.NOT_NEEDED)
            group.batch_id = ""
            batch.stats.carried += len(group.running) + len(group.rollouts)
            if group.rollouts or group.running or group.failures:
                record.carried[group.group_id] = group
                self._changes.group(group)
            else:
                fresh.append(group.prompt)
                self._changes.forget_group(group, with_prompt=False)
        self._changes.gone_prompts += batch.leave_prompts(record, fresh, self._name_of)
        batch.groups = {}
        batch.due = []
        batch.in_flight = 0

    def _take_actions(self) -> list[SamplerAction]:
        actions, self._actions = self._actions, []
        return actions
