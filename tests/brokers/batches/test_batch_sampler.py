"""What a batch sampler decides, row by row of the table in its docstring."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq import Job
from prorl_zmq.brokers.batches.batch_records import (
    CancelJobs,
    Deliver,
    Discard,
    DiscardReason,
    Ended,
    GiveUp,
    Launch,
    RememberedBatch,
    SamplerAction,
)
from prorl_zmq.brokers.batches.batch_sampler import BatchSampler
from prorl_zmq.brokers.batches.batch_view import batch_view, closed_view
from prorl_zmq.brokers.batches.group_filters import (
    KeepAll,
    KeepInformative,
    KeepMeanReward,
    KeepPolicy,
    KeepWhere,
    Verdict,
    keep_policy,
)
from prorl_zmq.brokers.batches.prompt import Prompt
from prorl_zmq.brokers.batches.rollout_group import Rollout, RolloutGroup
from prorl_zmq.errors import InvalidBatch, UnknownBatch
from prorl_zmq.wire.messages.batches import BatchOptions, GroupFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

LEASE_S = 60.0


class Trainer:
    """One session's sampler, the time, and what was decided."""

    def __init__(self) -> None:
        self.sampler = BatchSampler()
        self.now = 0.0
        self.version = 0
        self.running: list[str] = []
        self.actions: list[SamplerAction] = []

    def open(self, target: int = 1, size: int = 2, keep: KeepPolicy | None = None, **more: object) -> str:
        batch_id = f"b{sum(isinstance(action, Ended) for action in self.actions)}{len(self.actions)}"
        options = BatchOptions(target_groups=target, group_size=size, **more)  # type: ignore[arg-type]
        self.note(self.sampler.open("s", batch_id, options, keep or KeepInformative(), self.now))
        return batch_id

    def feed(self, batch_id: str, *prompts: str, last: bool = False) -> None:
        self.note(self.sampler.feed(batch_id, prompts, self.now, last=last))

    def launch(self, room: int) -> list[str]:
        """Give the prompts of the jobs that were started."""
        left = iter([True] * room)
        started = self.note(self.sampler.launch(lambda _: next(left, False), self.now))
        return [action.prompt for action in started if isinstance(action, Launch)]

    def complete(self, *rewards: float, version: int = 0, records: tuple[str, ...] = ()) -> list[SamplerAction]:
        """Jobs end in the order in which they were started."""
        done: list[SamplerAction] = []
        for reward in rewards:
            rollout = Rollout(self.running.pop(0), reward, 10, version, 1.0, records=records)
            done += self.note(self.sampler.job_completed(rollout, self.now))
        return done

    def fail(self, reason: str = "lease_lost") -> list[SamplerAction]:
        return self.note(self.sampler.job_failed(self.running.pop(0), reason, self.now))

    def note(self, actions: list[SamplerAction]) -> list[SamplerAction]:
        for action in actions:
            if isinstance(action, Launch):
                self.running.append(action.job_id)
            elif isinstance(action, CancelJobs):
                self.running = [job_id for job_id in self.running if job_id not in action.job_ids]
        self.actions += actions
        return actions


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def kinds(actions: Sequence[SamplerAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


# The way of a batch that meets no trouble -----------------------------------------------------------------------------


def test_a_group_whose_rewards_differ_meets_the_target(trainer: Trainer) -> None:
    batch = trainer.open()
    trainer.feed(batch, "p")
    assert trainer.launch(10) == ["p", "p"]
    assert trainer.complete(0.0) == []
    deliver, ended = trainer.complete(1.0)
    assert isinstance(deliver, Deliver)
    assert (deliver.batch_id, deliver.group.prompt, deliver.group.rewards) == (batch, "p", [0.0, 1.0])
    assert ended == Ended(batch, "met")


def test_a_group_of_equal_rewards_makes_room_for_another_prompt(trainer: Trainer) -> None:
    batch = trainer.open()
    trainer.feed(batch, "p", "q", "r")
    assert trainer.launch(2) == ["p", "p"]
    (discard,) = trainer.complete(0.0, 0.0)
    assert isinstance(discard, Discard)
    assert (len(discard.rollouts), discard.why) == (2, DiscardReason.NOT_KEPT)
    assert trainer.launch(3) == ["q", "q", "r"]


def test_room_is_filled_as_jobs_end_one_by_one(trainer: Trainer) -> None:
    batch = trainer.open(target=9)
    trainer.feed(batch, *"pqrstu")
    assert trainer.launch(3) == ["p", "p", "q"]
    trainer.complete(1.0)
    assert trainer.launch(1) == ["q"]


def test_places_of_groups_that_are_kept_for_sure_come_first(trainer: Trainer) -> None:
    batch = trainer.open(target=9, size=3)
    trainer.feed(batch, *"pq")
    trainer.launch(6)
    trainer.complete(0.0)
    trainer.fail()  # p misses two, undecided
    trainer.fail()
    trainer.complete(0.0, 1.0)
    trainer.fail()  # q misses one, and is informative
    assert trainer.launch(9) == ["q", "p", "p"]


def test_the_share_of_a_batch_is_its_weight(trainer: Trainer) -> None:
    light, heavy = trainer.open(target=99), None
    trainer.feed(light, *[f"l{n}" for n in range(40)])
    options = BatchOptions(target_groups=99, group_size=2, weight=3.0)
    heavy = "heavy"
    trainer.note(trainer.sampler.open("other", heavy, options, KeepInformative(), 0.0))
    trainer.feed(heavy, *[f"h{n}" for n in range(40)])
    started = trainer.launch(40)
    assert sum(prompt.startswith("h") for prompt in started) == 30


# Early termination and carry-over -------------------------------------------------------------------------------------


def met_with_more_under_way(trainer: Trainer, **more: object) -> list[SamplerAction]:
    """A batch is met by its first group; of the second one rollout is in, one runs; of the third both run."""
    batch = trainer.open(**more)
    trainer.feed(batch, *"pqrs")
    trainer.launch(6)
    trainer.complete(0.0)
    trainer.running.append(trainer.running.pop(0))  # p's other job goes on
    trainer.complete(0.5)
    trainer.running.insert(0, trainer.running.pop())
    return trainer.complete(1.0)


def test_nothing_is_carried_where_that_was_asked_for(trainer: Trainer) -> None:
    actions = met_with_more_under_way(trainer, carry="nothing")
    assert sorted(kinds(actions)) == ["CancelJobs", "CancelJobs", "Deliver", "Discard", "Ended"]
    assert trainer.running == []
    assert trainer.sampler.registry.batch("b00").stats.returned_prompts == 3
    trainer.open(target=3)
    assert trainer.launch(9) == ["q", "q", "r", "r", "s", "s"], "their prompts begin the next batch, without rollouts"


def test_a_finite_set_of_prompts_is_used_up_though_nothing_is_carried(trainer: Trainer) -> None:
    prompts = [f"p{number}" for number in range(10)]
    trainer.feed(trainer.open(target=3, keep=KeepAll(), carry="nothing"), *prompts, last=True)
    kept: list[str] = []
    while True:
        batch_id = next(iter(trainer.sampler.registry.batches))
        batch = trainer.sampler.registry.batch(batch_id)
        while batch.state == "open":
            trainer.launch(7 - len(trainer.running))
            trainer.complete(1.0)
        kept += [group.prompt for group in batch.ready.values()]
        trainer.sampler.acknowledge(batch_id, list(batch.ready))
        trainer.note(trainer.sampler.close(batch_id, trainer.now))
        if batch.state == "short":
            break
        trainer.feed(trainer.open(target=3, keep=KeepAll(), carry="nothing"), last=True)
    assert sorted(kept) == sorted(prompts)


def test_a_batch_that_stands_alone_names_the_prompts_that_it_did_not_use(trainer: Trainer) -> None:
    met_with_more_under_way(trainer, carry="nothing", adopt=False)
    report = trainer.sampler.registry.batch("b00").stats.report()
    assert (report.unused_prompts, report.returned_prompts) == (("q", "r", "s"), 0)
    assert sorted(trainer.sampler.take_changes().gone_prompts) == ["q", "r", "s"], "p's client does not have it yet"
    trainer.open(target=3)
    assert trainer.launch(9) == []


def test_finished_rollouts_go_on_into_the_next_batch(trainer: Trainer) -> None:
    actions = met_with_more_under_way(trainer, carry="finished")
    assert sorted(kinds(actions)) == ["CancelJobs", "CancelJobs", "Deliver", "Ended"]
    trainer.open(target=2)
    assert trainer.launch(9) == ["q", "r", "r", "s", "s"]
    (deliver,) = trainer.complete(1.0)
    assert isinstance(deliver, Deliver)
    assert deliver.group.rewards == [0.5, 1.0]


def test_running_jobs_go_on_into_the_next_batch(trainer: Trainer) -> None:
    actions = met_with_more_under_way(trainer, carry="running")
    assert sorted(kinds(actions)) == ["Deliver", "Ended"]
    assert len(trainer.running) == 3
    assert trainer.complete(0.5) == []  # between the batches: not informative, but nobody judges it now
    trainer.open(target=1)
    assert trainer.launch(9) == ["s", "s"]
    assert "Deliver" in kinds(trainer.complete(0.0, 1.0))


def test_a_batch_may_be_met_by_what_was_carried(trainer: Trainer) -> None:
    met_with_more_under_way(trainer, carry="running")
    trainer.complete(1.0)  # q is whole and informative
    trainer.open(target=1)
    assert isinstance(trainer.actions[-1], Ended)
    assert isinstance(trainer.actions[-2], Deliver)
    assert trainer.launch(9) == []


def test_closing_a_batch_that_is_open_carries_as_well(trainer: Trainer) -> None:
    batch = trainer.open(target=5)
    trainer.feed(batch, *"pq")
    trainer.launch(4)
    trainer.complete(1.0)
    assert trainer.note(trainer.sampler.close(batch, 0.0)) == []
    trainer.open(target=5)
    assert "Deliver" in kinds(trainer.complete(0.0))


# Staleness ------------------------------------------------------------------------------------------------------------


def test_rollouts_that_are_too_old_are_dropped_and_made_again(trainer: Trainer) -> None:
    batch = trainer.open(max_staleness=1)
    trainer.feed(batch, "p")
    trainer.launch(2)
    trainer.complete(1.0, version=0)
    assert trainer.note(trainer.sampler.set_version(1, 0.0)) == []
    (discard,) = trainer.note(trainer.sampler.set_version(2, 0.0))
    assert isinstance(discard, Discard)
    assert (len(discard.rollouts), discard.why) == (1, DiscardReason.STALE)
    assert trainer.launch(9) == ["p"]
    (discard,) = trainer.complete(0.0, version=0)
    assert isinstance(discard, Discard)
    assert discard.why == DiscardReason.STALE
    trainer.launch(9)
    assert kinds(trainer.complete(0.0, 1.0, version=2)) == ["Deliver", "Ended"]


def test_a_group_that_its_client_was_sent_is_not_taken_back_for_new_weights(trainer: Trainer) -> None:
    batch = trainer.open(target=2, max_staleness=1)
    trainer.feed(batch, *"pq")
    trainer.launch(4)
    trainer.complete(0.0, 1.0, 0.0, 1.0)
    given, other = trainer.sampler.registry.batch(batch).ready.values()
    trainer.sampler.mark_given(given, "client", 0.0)
    (discard,) = trainer.note(trainer.sampler.set_version(2, 0.0))
    assert isinstance(discard, Discard)
    assert {rollout.job_id for rollout in discard.rollouts}.isdisjoint(one.job_id for one in given.rollouts.values())
    assert other.rollouts == {}
    assert list(trainer.sampler.registry.batch(batch).ready.values()) == [given]


def test_rollouts_are_as_old_as_the_weights_of_their_own_model_say(trainer: Trainer) -> None:
    for prompt, model in (("p", "policy"), ("q", "b")):
        trainer.feed(trainer.open(max_staleness=1, model=model), prompt)
        assert trainer.launch(2) == [prompt] * 2
    trainer.note(trainer.sampler.set_version(5, 0.0, "b"))
    assert trainer.complete(1.0, version=0) == [], "the policy is at version 0"
    assert trainer.note(trainer.sampler.set_version(7, 0.0, "b")) == []
    (discard,) = trainer.note(trainer.sampler.set_version(2, 0.0))
    assert isinstance(discard, Discard)
    assert discard.why == DiscardReason.STALE
    assert trainer.complete(0.0, version=2) == []
    assert kinds(trainer.complete(0.0, version=5)) == ["Discard"], "two versions behind, begun with version 0"
    assert trainer.complete(1.0, version=6) == []
    assert sorted(trainer.launch(9)) == ["p", "q"]


def test_a_batch_adopts_what_batches_of_its_own_model_carried_over(trainer: Trainer) -> None:
    first = trainer.open(target=2)
    trainer.feed(first, "p", "waits")
    trainer.launch(2)
    trainer.note(trainer.sampler.close(first, 0.0))
    other = trainer.sampler.registry.batch(trainer.open(model="b"))
    assert (other.groups, list(other.prompts)) == ({}, [])
    trainer.note(trainer.sampler.close(other.batch_id, 0.0))
    again = trainer.sampler.registry.batch(trainer.open())
    assert ([group.prompt for group in again.groups.values()], list(again.prompts)) == (["p"], ["waits"])


def test_a_batch_knows_the_newest_weights_of_its_model(trainer: Trainer) -> None:
    registry, worked_s, wall = trainer.sampler.registry, lambda _: 0.0, lambda at: at
    batch = trainer.open(model="b")
    prompt = Prompt(1, "s", Job(task="math", instance={}, model="b"), 0)
    trainer.note(trainer.sampler.feed(batch, [prompt], 0.0))
    trainer.launch(1)
    trainer.note(trainer.sampler.set_version(7, 0.0, "b"))
    trainer.note(trainer.sampler.set_version(3, 0.0))
    record = registry.batch(batch)
    view = batch_view("r", record, record.status(), registry.version, worked_s, wall)
    assert (view.current_version, view.groups[0].cells[0].staleness) == (7, 7)
    registry.steps.weights_changed("b", 7, 1.0)
    registry.steps.weights_changed("policy", 3, 2.0)
    trainer.note(trainer.sampler.close(batch, 12.0))
    closed = registry.look_for(batch)
    assert isinstance(closed, RememberedBatch)
    assert closed_view("r", closed, registry.version, wall).current_version == 7
    listed = registry.steps.listed("r", 20.0, 1020.0)
    assert [step.weight_version for step in listed.steps] == [7]
    assert (listed.models, listed.weights) == (("b",), ((3, 1002.0),))
    assert listed.weights_of == {"b": ((7, 1001.0),)}


def test_a_batch_whose_engines_never_have_the_announced_weights_fails_and_says_why(trainer: Trainer) -> None:
    """Its rollouts were dropped and made again without end."""
    batch = trainer.open(max_staleness=1, max_replacements=2, max_given_up=2)
    trainer.feed(batch, *"pqrs", last=True)
    trainer.note(trainer.sampler.set_version(8, 0.0))
    for _ in range(20):
        if not trainer.launch(1):
            break
        trainer.complete(1.0, version=6)
    status = trainer.sampler.registry.batch(batch).status()
    assert status.state == "failed"
    assert status.problem == (
        "2 groups in a row could not be completed: older_weights_than_announced (6 jobs); `prorl backends list` says "
        "which weights each engine serves: load the announced ones with `update_weights`, or say with "
        "`set_weight_version` which ones they are"
    )


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_rollout_without_a_record_of_its_batch_is_a_failure(trainer: Trainer) -> None:
    batch = trainer.open(complete=("experts", "teacher"), max_replacements=2)
    trainer.feed(batch, "p")
    trainer.launch(2)
    (discard,) = trainer.complete(0.0, records=("experts",))
    assert isinstance(discard, Discard)
    assert discard.why == DiscardReason.UNRECORDED
    assert trainer.complete(1.0, records=("teacher", "experts", "top_logprobs")) == []
    trainer.launch(1)
    assert kinds(trainer.complete(0.0, records=("experts", "teacher")))[0] == "Deliver"
    status = trainer.sampler.registry.batch(batch).status()
    assert (status.state, status.failed, status.failures) == ("met", 1, {"record_dropped": 1})
    report = trainer.sampler.registry.batch(batch).stats.report()
    assert (report.completed, report.wasted) == (2, {"record_dropped": 1})


def test_carried_rollouts_without_a_record_of_the_next_batch_are_replaced(trainer: Trainer) -> None:
    batch = trainer.open(target=2)
    trainer.feed(batch, "p")
    trainer.launch(2)
    trainer.complete(0.0)
    trainer.note(trainer.sampler.close(batch, 0.0))
    trainer.complete(1.0, records=("experts",))
    before = len(trainer.actions)
    batch = trainer.open(complete=("experts",))
    (discard,) = trainer.actions[before:]
    assert isinstance(discard, Discard)
    assert [rollout.reward for rollout in discard.rollouts] == [0.0]
    trainer.launch(1)
    assert kinds(trainer.complete(0.0, records=("experts",)))[0] == "Deliver"


def asks(prompt: str, records: Sequence[str]) -> bool:
    """Whether a prompt such as `p+experts` asks for these records."""
    return {*records}.issubset(prompt.split("+")[1:])


def test_a_batch_takes_over_no_group_or_prompt_that_does_not_ask_for_its_records(trainer: Trainer) -> None:
    trainer.sampler = BatchSampler(asks=asks)
    batch = trainer.open(target=2)
    trainer.feed(batch, "p", "q+experts", "r", "s+experts+teacher")
    assert trainer.launch(4) == ["p", "p", "q+experts", "q+experts"]
    trainer.note(trainer.sampler.close(batch, 0.0))
    needs = trainer.open(complete=("experts",))
    record = trainer.sampler.registry.batch(needs)
    assert [group.prompt for group in record.groups.values()] == ["q+experts"]
    assert list(record.prompts) == ["s+experts+teacher"]
    before = len(trainer.actions)
    trainer.complete(0.0, 1.0)
    assert trainer.actions[before:] == [], "the rollouts of p are carried, neither lost nor repeated"
    assert record.status().failed == 0
    trainer.note(trainer.sampler.close(needs, 0.0))
    takes_all = trainer.sampler.registry.batch(trainer.open(target=9))
    assert [group.prompt for group in takes_all.ready.values()] == ["p"]
    assert sorted(takes_all.prompts) == ["r", "s+experts+teacher"]


def test_a_restored_batch_takes_no_prompt_that_does_not_ask_for_its_records(trainer: Trainer) -> None:
    trainer.sampler = BatchSampler(asks=asks)
    first = trainer.open()
    trainer.feed(first, "p", "q+experts")
    trainer.note(trainer.sampler.close(first, 0.0))
    second = trainer.open(complete=("experts",))
    before = trainer.sampler.registry
    again = BatchSampler(asks=asks)
    again.restore(before.sessions.values(), before.batches.values(), [], {}, 0.0)
    assert list(again.registry.batch(second).prompts) == ["q+experts"]
    assert list(again.registry.sessions["s"].prompts["policy"]) == ["p"]


def test_a_job_that_fails_is_replaced_up_to_a_limit(trainer: Trainer) -> None:
    batch = trainer.open(max_replacements=2)
    trainer.feed(batch, "p", last=True)
    trainer.launch(2)
    trainer.complete(1.0)
    for _ in range(2):
        assert trainer.fail() == []
        assert trainer.launch(9) == ["p"]
    discard, give_up, ended = trainer.fail("timeout")
    assert isinstance(discard, Discard)
    assert isinstance(give_up, GiveUp)
    assert give_up.group.failures == {"lease_lost": 2, "timeout": 1}
    (given_up,) = trainer.sampler.registry.batch(batch).stats.report().given_up
    assert (given_up.prompt_id, given_up.failures) == ("p", {"lease_lost": 2, "timeout": 1})
    assert ended == Ended(batch, "short")


def test_a_reward_that_is_no_number_is_a_failure(trainer: Trainer) -> None:
    batch = trainer.open(max_replacements=0)
    trainer.feed(batch, "p")
    trainer.launch(2)
    actions = trainer.complete(float("nan"))
    assert [dict(action.group.failures) for action in actions if isinstance(action, GiveUp)] == [
        {"reward_not_finite": 1}
    ]


def test_a_stream_that_ends_before_the_target_says_so(trainer: Trainer) -> None:
    batch = trainer.open(target=2)
    trainer.feed(batch, "p", last=True)
    trainer.launch(2)
    assert kinds(trainer.complete(0.0, 1.0)) == ["Deliver", "Ended"]
    assert trainer.sampler.registry.batch(batch).state == "short"


def test_a_policy_that_raises_ends_its_batch_with_the_reason(trainer: Trainer) -> None:
    def broken(rewards: Sequence[float]) -> bool:
        raise ZeroDivisionError(f"no {len(rewards)}")

    batch = trainer.open(keep=KeepWhere("broken", broken))
    trainer.feed(batch, "p")
    trainer.launch(2)
    (ended,) = [action for action in trainer.complete(0.0, 1.0) if isinstance(action, Ended)]
    assert ended.state == "failed"
    assert trainer.sampler.registry.batch(batch).problem == "the keep policy failed: ZeroDivisionError: no 2"
    assert trainer.launch(9) == []


def play(trainer: Trainer, white: float, black: float) -> list[SamplerAction]:
    """Complete a game of two players, whose main reward is their sum."""
    roles = (("white", white), ("black", black))
    rollout = Rollout(trainer.running.pop(0), white + black, 10, 0, 1.0, roles)
    return trainer.note(trainer.sampler.job_completed(rollout, trainer.now))


def test_a_zero_sum_game_is_informative_if_a_players_rewards_differ(trainer: Trainer) -> None:
    batch = trainer.open(size=3)
    trainer.feed(batch, "drawn", "won")
    trainer.launch(6)
    assert [kinds(play(trainer, *rewards)) for rewards in [(0.0, 0.0)] * 3] == [[], [], ["Discard"]]
    assert kinds(play(trainer, 1.0, -1.0)) == []
    assert kinds(play(trainer, -1.0, 1.0)) == []
    deliver, ended = play(trainer, 1.0, -1.0)
    assert isinstance(deliver, Deliver)
    assert (deliver.group.prompt, deliver.group.rewards) == ("won", [0.0, 0.0, 0.0])
    assert ended == Ended(batch, "met")


def with_other(trainer: Trainer, version_of_b: int) -> list[SamplerAction]:
    """Complete a job with tokens of version 0 of the policy, and of another version of the model `b`."""
    rollout = Rollout(trainer.running.pop(0), float(len(trainer.running)), 10, 0, 1.0, (), (("b", version_of_b),))
    return trainer.note(trainer.sampler.job_completed(rollout, trainer.now))


def test_each_models_tokens_are_as_old_as_that_models_weights_say(trainer: Trainer) -> None:
    trainer.note(trainer.sampler.set_version(40, trainer.now, "b"))
    batch = trainer.open(max_staleness=2)
    trainer.feed(batch, "p")
    trainer.launch(2)
    assert kinds(with_other(trainer, 38)) == [], "two versions behind the newest weights of b, none behind the policy's"
    assert kinds(trainer.note(trainer.sampler.set_version(41, trainer.now, "c"))) == []
    assert kinds(trainer.note(trainer.sampler.set_version(41, trainer.now, "b"))) == ["Discard"]
    trainer.launch(1)
    assert kinds(with_other(trainer, 39)) == []
    assert kinds(with_other(trainer, 39))[0] == "Deliver"


def test_tokens_of_older_weights_than_another_model_had_when_their_job_began_are_refused(trainer: Trainer) -> None:
    trainer.note(trainer.sampler.set_version(40, trainer.now, "b"))
    batch = trainer.open(max_staleness=2)
    trainer.feed(batch, "p")
    trainer.launch(2)
    (discard,) = with_other(trainer, 37)
    assert isinstance(discard, Discard)
    assert discard.why == DiscardReason.STALE
    (group,) = trainer.sampler.registry.batch(batch).groups.values()
    assert group.failures == {"older_weights_than_announced": 1}


@given(st.lists(st.tuples(*[st.sampled_from([-1.0, 0.0, 0.5])] * 3), min_size=1, max_size=4))
def test_a_group_is_informative_if_and_only_if_an_advantage_is_not_zero(
    games: list[Sequence[float]],
) -> None:
    """Of the main reward, or of a player's."""
    group = RolloutGroup("g", "p", len(games), 0, "s", "b")
    for place, (main, white, black) in enumerate(games):
        roles = (("white", white), ("black", black))[:: 1 if place % 2 else -1]
        group.rollouts[place] = Rollout(f"j{place}", main, 10, 0, 1.0, roles)
    columns = [*zip(*games, strict=True)]
    teaches = any(abs(reward - statistics.fmean(column)) > 1e-6 for column in columns for reward in column)
    verdict = KeepInformative().verdict(group.rewards, group.size, group.role_rewards)
    assert verdict == (Verdict.KEEP if teaches else Verdict.DROP)


def test_other_policies_judge_the_main_reward(trainer: Trainer) -> None:
    batch = trainer.open(keep=KeepMeanReward(0.0, 0.0))
    trainer.feed(batch, "p")
    trainer.launch(2)
    play(trainer, 1.0, -1.0)
    assert kinds(play(trainer, 1.0, -1.0)) == ["Deliver", "Ended"]


def test_groups_of_one_are_never_informative(trainer: Trainer) -> None:
    with pytest.raises(InvalidBatch, match="group_size of 2 or more"):
        trainer.open(size=1)
    assert not trainer.sampler.registry.batches


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (GroupFilter("mean_reward"), "needs `low`"),
        (GroupFilter("mean_reward", low=0.9, high=0.1), "no mean reward"),
        (GroupFilter("informative", low=0.1), "takes no low"),
        (GroupFilter("nonesuch"), "has all, informative, mean_reward"),
    ],
)
def test_policies_that_cannot_be_are_refused(wrong: GroupFilter, says: str) -> None:
    with pytest.raises(InvalidBatch, match=says):
        keep_policy(wrong).check(2)


def test_two_trainers_that_close_one_batch(trainer: Trainer) -> None:
    batch = trainer.open()
    trainer.sampler.close(batch, 0.0)
    with pytest.raises(UnknownBatch, match="it was closed"):
        trainer.sampler.close(batch, 0.0)


def test_a_client_that_vanishes_takes_its_jobs_with_it(trainer: Trainer) -> None:
    batch = trainer.open(target=5)
    trainer.feed(batch, *"pq")
    trainer.launch(4)
    trainer.complete(1.0)
    trainer.sampler.registry.heard("s", 30.0)
    assert trainer.sampler.tick(30.0 + LEASE_S - 1) == []
    actions = trainer.note(trainer.sampler.tick(30.0 + LEASE_S))
    assert sorted(kinds(actions)) == ["CancelJobs", "CancelJobs", "Discard"]
    assert trainer.running == []
    with pytest.raises(UnknownBatch):
        trainer.sampler.feed(batch, ["r"], 200.0)


def test_a_group_that_can_no_longer_be_kept_is_stopped(trainer: Trainer) -> None:
    batch = trainer.open(size=4, keep=KeepMeanReward(0.5, 1.0, 0.0, 1.0))
    trainer.feed(batch, "p", "q")
    trainer.launch(4)
    actions = trainer.complete(0.0, 0.0, 0.0)
    assert sorted(kinds(actions)) == ["CancelJobs", "Discard"]
    assert trainer.launch(1) == ["q"]


def test_it_is_left_to_run_where_that_was_asked_for(trainer: Trainer) -> None:
    batch = trainer.open(size=4, keep=KeepMeanReward(0.5, 1.0, 0.0, 1.0), stop_early=False)
    trainer.feed(batch, "p", "q")
    trainer.launch(4)
    assert trainer.complete(0.0, 0.0, 0.0) == []
    assert kinds(trainer.complete(1.0)) == ["Discard"]


# What was found by attack ---------------------------------------------------------------------------------------------


def test_a_group_whose_early_verdict_rested_on_a_stale_rollout_is_completed(trainer: Trainer) -> None:
    keep = KeepMeanReward(0.9, 1.0, 0.0, 1.0)
    batch = trainer.open(size=4, keep=keep, stop_early=False, max_staleness=0)
    trainer.feed(batch, "p", last=True)
    trainer.launch(2)
    trainer.complete(0.0)  # it can no longer be kept, and its other job is left to run
    trainer.note(trainer.sampler.set_version(1, 0.0))
    assert trainer.launch(9) == ["p", "p", "p"]
    assert kinds(trainer.complete(1.0, 1.0, 1.0, 1.0, version=1)) == ["Deliver", "Ended"]


def test_a_whole_group_is_adopted_whatever_failed_on_the_way(trainer: Trainer) -> None:
    batch = trainer.open(target=2, max_replacements=3)
    trainer.feed(batch, "p")
    trainer.launch(2)
    trainer.fail()
    trainer.launch(1)
    trainer.complete(0.0, 1.0)
    trainer.note(trainer.sampler.close(batch, 0.0))
    trainer.open(target=1, max_replacements=0)
    assert kinds(trainer.actions[-2:]) == ["Deliver", "Ended"]


def test_a_batch_that_new_weights_reopen_takes_back_what_it_carried(trainer: Trainer) -> None:
    batch = trainer.open(target=1, max_staleness=0)
    trainer.feed(batch, "p", "q", last=True)
    trainer.launch(4)
    trainer.complete(0.0, 1.0)  # met by p; q is carried
    trainer.note(trainer.sampler.set_version(1, 0.0))
    assert trainer.sampler.registry.batch(batch).state == "open"
    assert kinds(trainer.complete(0.0, 1.0, version=1)) == ["Deliver", "Ended"]
    assert trainer.sampler.registry.batch(batch).state == "met"


def test_a_lease_is_the_longest_of_a_session(trainer: Trainer) -> None:
    trainer.open(lease_s=60.0)
    trainer.feed("b00", "p")
    trainer.launch(1)
    trainer.open(lease_s=2.0)
    assert trainer.sampler.tick(30.0) == []
    assert len(trainer.sampler.registry) == 2


def test_a_policy_that_ends_the_process_does_not(trainer: Trainer) -> None:
    def leaving(_: Sequence[float]) -> bool:
        raise SystemExit("x" * 10_000)

    batch = trainer.open(keep=KeepWhere("leaving", leaving))
    trainer.feed(batch, "p")
    trainer.launch(2)
    trainer.complete(0.0, 1.0)
    assert trainer.sampler.registry.batch(batch).state == "failed"
    assert len(trainer.sampler.registry.batch(batch).problem) < 1000


def test_a_policy_that_gives_no_bool_fails(trainer: Trainer) -> None:
    batch = trainer.open(keep=KeepWhere("odd", lambda _: "yes"))  # type: ignore[arg-type,return-value]
    trainer.feed(batch, "p")
    trainer.launch(2)
    trainer.complete(0.0, 1.0)
    assert "gave a str, not a bool" in trainer.sampler.registry.batch(batch).problem


def test_a_closed_batch_is_listed_as_a_step_of_its_training(trainer: Trainer) -> None:
    steps = trainer.sampler.registry.steps
    trainer.now = 5.0
    batch = trainer.open()
    trainer.feed(batch, "p")
    trainer.launch(2)
    trainer.now = 9.0
    trainer.note(trainer.sampler.set_version(3, trainer.now))
    steps.weights_changed("policy", 3, trainer.now)
    steps.weights_changed("policy", 3, 9.5)  # announced again
    trainer.now = 10.0
    trainer.complete(0.0, 1.0, version=1)
    (group,) = trainer.sampler.registry.batch(batch).ready.values()
    trainer.sampler.mark_given(group, "client", 11.0)
    trainer.note(trainer.sampler.close(batch, 12.0))
    listed = steps.listed("r", 20.0, 1020.0)
    (step,) = listed.steps
    assert (step.batch_id, step.session, step.weight_version) == (batch, "s", 3)
    assert (step.opened_at, step.ended_at, step.served_at, step.closed_at) == (1005.0, 1010.0, 1011.0, 1012.0)
    assert (step.groups, step.rollouts, step.failed, step.reward, step.tokens) == (1, 2, 0, 0.5, 10.0)
    assert (step.staleness, step.staleness_most) == (2.0, 2.0)
    assert listed.weights == ((3, 1009.0),)
