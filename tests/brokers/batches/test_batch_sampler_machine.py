"""The batch sampler under every order of events: each job that it launches is accounted for exactly once."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.machines import few_and_many

from prorl_zmq.brokers.batches.batch_records import (
    BatchRecord,
    CancelJobs,
    Deliver,
    Discard,
    DiscardReason,
    Ended,
    GiveUp,
    Launch,
    SamplerAction,
    SessionRecord,
)
from prorl_zmq.brokers.batches.batch_sampler import BatchSampler
from prorl_zmq.brokers.batches.group_filters import Verdict, keep_policy
from prorl_zmq.brokers.batches.rollout_group import Rollout, RolloutGroup
from prorl_zmq.wire.messages.batches import BatchOptions, GroupFilter

if TYPE_CHECKING:
    from hypothesis import settings

POLICIES = [
    GroupFilter("all"),
    GroupFilter("informative"),
    GroupFilter("mean_reward", low=0.2, high=0.8, least=0.0, most=1.0),
]
SESSIONS = ("left", "right")


class Kept:
    """What a journal would hold, and the sampler that is made from it."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionRecord] = {}
        self.batches: dict[str, BatchRecord] = {}
        self.groups: dict[str, RolloutGroup] = {}
        self.prompts: dict[int, str] = {}
        """Their sessions."""

    def note(self, sampler: BatchSampler) -> None:
        changes = sampler.take_changes()
        self.sessions.update(copy.deepcopy(changes.sessions))
        self.batches.update(copy.deepcopy(changes.batches))
        self.groups.update(copy.deepcopy(changes.groups))
        for kept, gone in (
            (self.sessions, changes.gone_sessions),
            (self.batches, changes.gone_batches),
            (self.groups, changes.gone_groups),
        ):
            for name in gone:
                kept.pop(name, None)
        for prompt in changes.gone_prompts:
            self.prompts.pop(prompt, None)

    def restored(self, version: int, now: float) -> tuple[BatchSampler, list[SamplerAction]]:
        sampler = BatchSampler()
        taken = {group.prompt for group in self.groups.values()}
        sessions = []
        for old in self.sessions.values():
            place = SessionRecord(old.session, now, old.lease_s)
            mine = [number for number, session in self.prompts.items() if session == old.session]
            place.prompts["policy"].extend(sorted(number for number in mine if number not in taken))
            sessions.append(place)
        batches = []
        for old in self.batches.values():
            batch = BatchRecord(
                old.batch_id, old.session, old.options, old.group_filter, old.key, old.state, old.problem
            )
            batch.fed, batch.stream_ended, batch.opened = old.fed, old.stream_ended, old.opened
            batches.append(batch)
        for batch in batches:
            batch.stats = copy.deepcopy(self.batches[batch.batch_id].stats)
        return sampler, sampler.restore(
            sessions, batches, copy.deepcopy(list(self.groups.values())), {"policy": version}, now
        )


class BatchSamplerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sampler = BatchSampler()
        self.kept = Kept()
        self.now = 0.0
        self.version = 0
        self.prompts = 0
        self.opened = 0
        self.batches: dict[str, tuple[str, BatchOptions]] = {}
        self.running: dict[str, str] = {}
        """The group of each job that runs."""
        self.finished: dict[str, Rollout] = {}
        """Rollouts that are in, of which nothing has become yet."""
        self.launched_with: dict[str, object] = {}
        """The prompt of each group."""
        self.settled: set[str] = set()
        """Jobs of which something has become."""
        self.fetched: set[str] = set()
        """Groups that a client has."""

    @rule(
        session=st.sampled_from(SESSIONS),
        groups=st.integers(1, 3),
        size=st.integers(2, 3),
        keep=st.sampled_from(POLICIES),
        carry=st.sampled_from(["nothing", "finished", "running"]),
        max_staleness=st.none() | st.integers(0, 2),
        max_replacements=st.integers(0, 2),
        stop_early=st.booleans(),
    )
    def open_batch(self, session: str, groups: int, size: int, keep: GroupFilter, **more: object) -> None:
        batch_id = f"batch-{self.opened}"
        self.opened += 1
        options = BatchOptions(target_groups=groups, group_size=size, keep=keep, **more)  # type: ignore[arg-type]
        self.batches[batch_id] = session, options
        self.check(self.sampler.open(session, batch_id, options, keep_policy(keep), self.now))

    @precondition(lambda self: self.sampler.registry.batches)
    @rule(data=st.data(), count=st.integers(0, 3), last=st.booleans())
    def feed(self, data: st.DataObject, count: int, last: bool) -> None:
        batch_id = self.some_batch(data)
        prompts = range(self.prompts, self.prompts + count)
        self.prompts += count
        self.kept.prompts.update(dict.fromkeys(prompts, self.batches[batch_id][0]))
        self.check(self.sampler.feed(batch_id, prompts, self.now, last=last))

    @rule(room=st.integers(0, 8))
    def launch(self, room: int) -> None:
        left = iter([True] * room)
        before = len(self.running)
        self.check(self.sampler.launch(lambda _: next(left, False), self.now))
        launched = len(self.running) - before
        assert launched <= room
        if launched < room:
            assert self.sampler.launch(lambda _: True, self.now) == [], "what could run runs"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.5, 1.0]), behind=st.integers(0, 3))
    def complete(self, data: st.DataObject, reward: float, behind: int) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[job_id]
        rollout = Rollout(job_id, reward, 10, max(0, self.version - behind), 1.0)
        self.finished[job_id] = rollout
        self.check(self.sampler.job_completed(rollout, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), nan=st.booleans())
    def fail(self, data: st.DataObject, nan: bool) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[job_id]
        self.settled.add(job_id)
        if nan:
            self.check(self.sampler.job_completed(Rollout(job_id, float("nan"), 10, self.version, 1.0), self.now))
        else:
            self.check(self.sampler.job_failed(job_id, "lease_lost", self.now))

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def fail_late(self, data: st.DataObject) -> None:
        """The word of a job that was cancelled."""
        job_id = data.draw(st.sampled_from(sorted(self.settled)))
        assert self.sampler.job_failed(job_id, "cancelled", self.now) == []

    @rule(more=st.integers(0, 2))
    def update_weights(self, more: int) -> None:
        self.version += more
        self.check(self.sampler.set_version(self.version, self.now))

    @precondition(lambda self: self.sampler.registry.batches)
    @rule(data=st.data(), acknowledged=st.booleans())
    def fetch(self, data: st.DataObject, acknowledged: bool) -> None:
        batch_id = self.some_batch(data)
        ready = [group for group in self.sampler.registry.batch(batch_id).ready.values() if not group.given_to]
        for group in ready[:1]:
            self.sampler.mark_given(group, "client", self.now)
            if acknowledged:
                assert self.sampler.acknowledge(batch_id, [group.group_id]) == [group]
                assert self.sampler.acknowledge(batch_id, [group.group_id]) == []
                self.take(group, batch_id)

    @precondition(lambda self: self.sampler.registry.batches)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        batch_id = self.some_batch(data)
        self.check(self.sampler.close(batch_id, self.now))

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.check(self.sampler.tick(self.now))

    @rule(session=st.sampled_from(SESSIONS))
    def hear(self, session: str) -> None:
        self.sampler.registry.heard(session, self.now)

    @rule()
    def restart(self) -> None:
        """The broker is killed and started anew; what it had noted is there, and nothing that it had not told."""
        self.sampler, actions = self.kept.restored(self.version, self.now)
        self.check(actions)

    # What must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_noted(self) -> None:
        self.kept.note(self.sampler)

    @invariant()
    def what_runs_is_known(self) -> None:
        assert len(self.sampler) == len(self.running)
        assert all(job_id in self.sampler for job_id in self.running)

    @invariant()
    def in_flight_is_counted(self) -> None:
        for batch in tuple(self.sampler.registry.batches.values()):
            assert batch.in_flight == sum(len(group.running) for group in batch.groups.values())
            if batch.state == "met":
                assert batch.stats.kept_groups >= batch.options.target_groups
            if batch.state != "open":
                assert not batch.groups

    @invariant()
    def what_waits_for_its_client_is_whole_and_fresh(self) -> None:
        for batch in tuple(self.sampler.registry.batches.values()):
            for group in batch.ready.values():
                assert sorted(group.rollouts) == list(range(batch.options.group_size))
                assert not group.running
                assert group.group_id not in self.fetched
                assert batch.group_filter.verdict(group.rewards, group.size) == Verdict.KEEP
                limit = batch.options.max_staleness
                if limit is not None and not group.given_to:
                    assert all(rollout.version >= self.version - limit for rollout in group.rollouts.values())

    def teardown(self) -> None:
        for session in SESSIONS:
            self.check(self.sampler.close_session(session, self.now))
        assert not self.running
        assert not self.finished, "no rollout is forgotten"
        self.kept.note(self.sampler)
        assert [self.kept.sessions, self.kept.batches, self.kept.groups, self.kept.prompts] == [{}, {}, {}, {}]

    def some_batch(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.sampler.registry.batches)))

    def take(self, group: RolloutGroup, batch_id: str) -> None:
        assert group.group_id not in self.fetched
        self.fetched.add(group.group_id)
        for rollout in group.rollouts.values():
            self.settle(rollout)

    def check(self, actions: list[SamplerAction]) -> None:
        for action in actions:
            match action:
                case Launch(group_id, job_id, prompt, session):
                    assert job_id not in {*self.running, *self.settled, *self.finished}
                    assert self.launched_with.setdefault(group_id, prompt) == prompt
                    assert self.batches[group_id.rpartition(".")[0]][0] == session
                    self.running[job_id] = group_id
                case CancelJobs(job_ids, _):
                    for job_id in job_ids:
                        del self.running[job_id]
                        self.settled.add(job_id)
                case Discard(rollouts, why):
                    for rollout in rollouts:
                        self.settle(rollout)
                        assert why != DiscardReason.STALE or rollout.version < self.version
                case Deliver(batch_id, group):
                    assert group.group_id in self.sampler.registry.batch(batch_id).ready
                case GiveUp(batch_id, group):
                    assert sum(group.failures.values()) > self.batches[batch_id][1].max_replacements
                case Ended(batch_id, state):
                    assert state in ("met", "short")

    def settle(self, rollout: Rollout) -> None:
        assert self.finished.pop(rollout.job_id) == rollout
        self.settled.add(rollout.job_id)


@few_and_many(80, steps=50)
def test_batch_sampler(runs: settings) -> None:
    run_state_machine_as_test(BatchSamplerMachine, settings=runs)
