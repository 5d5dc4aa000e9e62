"""Batches of groups through a whole service: prompts in, groups out, and what becomes of everything else."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support.waiting import until

from prorl_zmq import AsyncRolloutClient, mean_reward
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.errors import (
    BatchFailed,
    Closed,
    InvalidBatch,
    InvalidJob,
    JournalFailed,
    MalformedMessage,
    RequestTimeout,
    UnknownBatch,
    UnknownTask,
)
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.engines import WeightUpdate

from .conftest import SMALL, busy_slots, in_process, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prorl_zmq import Job, RolloutClient
    from prorl_zmq.testing import LocalService
    from prorl_zmq.wire.messages.batches import BatchStatus

WAIT_S = 60.0


@pytest.fixture
def service(shared_service: LocalService) -> LocalService:
    return shared_service


def endless(**instance: str) -> Iterator[Job]:
    for number in itertools.count():
        yield msgspec.structs.replace(scripted(**instance), job_id=f"prompt-{number}")


def my_batch(client: RolloutClient) -> BatchStatus:
    (batch,) = [batch for batch in client.status().batches if batch.session == client.session]
    return batch


def test_a_batch_gives_whole_groups_of_the_prompts_that_were_fed(service: LocalService) -> None:
    with service.client() as client:
        with client.open_batch(3, 4) as batch:
            batch.feed(endless(eval="alternate"))
            groups = list(batch)
        assert batch.state == "met"
        assert [group.prompt_id for group in groups] == ["prompt-0", "prompt-1", "prompt-2"]
        for group in groups:
            assert sorted(group.rewards) == [0.0, 0.0, 1.0, 1.0]
            assert {trajectory.outcome for trajectory in group.trajectories} == {"completed"}
            assert {trajectory.group_id for trajectory in group.trajectories} == {group.group_id}
            assert len({trajectory.job_id for trajectory in group.trajectories}) == 4
        assert batch.report is not None
        assert batch.report.kept_groups == 3
        assert batch.report.kept.reward.mean == 0.5
        assert client.collect(wait_s=0) == []  # what belongs to a group comes with it


def test_prompts_are_drawn_only_as_they_are_wanted(service: LocalService) -> None:
    drawn = []

    def prompts() -> Iterator[Job]:
        for job in endless(eval="alternate"):
            drawn.append(job.job_id)
            yield job

    with service.client() as client, client.open_batch(2, 4) as batch:
        batch.feed(prompts())
        assert len(list(batch)) == 2
    assert len(drawn) <= 16  # room for 8 jobs in INIT and as many more


def test_groups_of_equal_rewards_are_dropped_and_a_stream_that_ends_says_so(service: LocalService) -> None:
    with service.client() as client, client.open_batch(2, 2) as batch:
        batch.feed([scripted(), scripted(eval="alternate"), scripted(eval="one")])
        groups = list(batch)
    assert len(groups) == 1
    assert batch.state == "short"
    assert batch.report is not None
    assert (batch.report.kept_groups, batch.report.dropped_groups) == (1, 2)
    assert batch.report.dropped.reward.count == 4


def test_two_batches_share_the_slots(service: LocalService) -> None:
    with service.client() as one, service.client() as other:
        first = one.open_batch(2, 2, keep="all")
        second = other.open_batch(2, 2, keep="all", weight=2.0)
        first.feed(endless())
        second.feed(endless())
        assert {len(list(first)), len(list(second))} == {2}
        first.close()
        second.close()


def test_each_batch_runs_what_it_was_fed(service: LocalService) -> None:
    with service.client() as client, client.open_batch(2, 2) as one, client.open_batch(2, 2) as other:
        one.feed([scripted(eval="one"), *itertools.islice(endless(eval="alternate"), 2)])
        other.feed(msgspec.structs.replace(scripted(eval="alternate"), job_id=f"other-{n}") for n in range(2))
        assert [group.prompt_id for group in other] == ["other-0", "other-1"]
        assert [group.prompt_id for group in one] == ["prompt-0", "prompt-1"]


def test_what_a_met_batch_has_under_way_is_cancelled_or_carried(service: LocalService, tmp_path: Path) -> None:
    slow = scripted(run="sleep", mark=str(tmp_path / "mark"))
    with service.client() as client:
        with client.open_batch(1, 2, carry="nothing") as batch:
            batch.feed([slow, scripted(eval="alternate")])
            assert len(list(batch)) == 1
        until(lambda: busy_slots(service) == 0, "the slots of jobs that are not needed", WAIT_S)
        assert batch.report is not None
        assert (batch.report.wasted, batch.report.returned_prompts) == ({"not_needed": 2}, 1)
    with service.client() as client:
        waiting = scripted(run="wait", eval="alternate", mark=str(tmp_path / "held"))
        with client.open_batch(1, 2, carry="running") as batch:
            batch.feed([waiting, scripted(eval="alternate")])
            assert [group.prompt_id == waiting.job_id for group in batch] == [False]
        assert busy_slots(service) == 2
        (tmp_path / "held.go").touch()
        with client.open_batch(1, 2) as batch:
            assert [group.prompt_id for group in batch] == [waiting.job_id]
        assert batch.report is not None
        assert (batch.report.adopted, batch.report.launched) == (2, 0)


def test_a_group_that_was_not_fetched_goes_on_into_the_next_batch(service: LocalService) -> None:
    with service.client() as client:
        with client.open_batch(2, 2) as batch:
            batch.feed(endless(eval="alternate"))
            first = batch.next_group()
            assert first is not None
            until(lambda: my_batch(client).state == "met", "both groups")
        with client.open_batch(1, 2) as batch:
            second = batch.next_group()
        assert second is not None
        assert second.group_id != first.group_id


def test_a_batch_that_is_left_early_reports_what_it_carries(service: LocalService, tmp_path: Path) -> None:
    with service.client() as client:
        with client.open_batch(1, 2) as batch:
            batch.feed(scripted(run="wait", mark=str(tmp_path / "mark")))
            with pytest.raises(RequestTimeout):
                batch.next_group(0.5)
            until(lambda: my_batch(client).in_flight == 2, "both jobs", WAIT_S)
        assert batch.report is not None
        assert (batch.report.launched, batch.report.carried) == (2, 2)
        (tmp_path / "mark.go").touch()


def test_failures_are_replaced_up_to_a_limit_and_then_told(service: LocalService) -> None:
    with service.client() as client, client.open_batch(1, 2, max_replacements=1) as batch:
        bad = scripted(run="raise")
        batch.feed([bad])
        assert list(batch) == []
    assert batch.state == "short"
    assert batch.report is not None
    (given_up,) = batch.report.given_up
    assert given_up.prompt_id == bad.job_id
    assert given_up.failures == {"handler_failed": 2}


def test_a_reward_that_is_no_number_is_a_failure_and_never_a_sample(service: LocalService) -> None:
    with service.client() as client, client.open_batch(1, 2, keep="all", max_replacements=0) as batch:
        batch.feed([scripted(eval="nan")])
        assert list(batch) == []
    assert batch.report is not None
    assert batch.report.given_up_groups == 1
    assert batch.report.kept_groups == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"target_groups": 0}, "target_groups"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 1}, "group_size"),
        ({"weight": -1.0}, "weight"),
        ({"carry": "all"}, "carry"),
        ({"keep": len}, "keep"),
        ({"max_given_up": 0}, "max_given_up"),
        ({"keep": "nonesuch"}, "keep"),
        ({"keep": mean_reward(0.9, 0.1)}, "keep"),
        ({"keep": mean_reward()}, "keep"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_batches_that_cannot_be_are_refused(service: LocalService, options: dict[str, object], field: str) -> None:
    with service.client() as client:
        with pytest.raises(InvalidBatch) as error:
            client.open_batch(**{"target_groups": 1, "group_size": 2, **options})  # type: ignore[arg-type]
        assert error.value.fields["field"] == field
        assert all(batch.session != client.session for batch in client.status().batches)


def test_prompts_that_are_no_jobs_are_named_and_the_others_run(service: LocalService) -> None:
    with service.client() as client, client.open_batch(1, 2) as batch:
        unknown = msgspec.structs.replace(scripted(), task="nonesuch")
        wrong = msgspec.structs.replace(scripted(), instance={"ru": "x"})
        batch.feed([unknown, wrong, scripted(eval="alternate")])
        with pytest.raises(UnknownTask, match="nonesuch"):
            batch.next_group()
        with pytest.raises(InvalidJob, match="ru"):
            batch.next_group()
        assert batch.next_group() is not None


def test_an_evaluation_takes_nothing_of_a_training(service: LocalService) -> None:
    with service.client() as client:
        with client.open_batch(1, 2) as batch:
            batch.feed(endless(eval="alternate"))
            assert len(list(batch)) == 1
        with client.open_batch(2, 2, keep="all", adopt=False, carry="nothing") as batch:
            batch.feed(msgspec.structs.replace(scripted(), job_id=f"held-out-{n}") for n in range(2))
            assert [group.prompt_id for group in batch] == ["held-out-0", "held-out-1"]


def test_a_batch_whose_groups_all_fail_ends_and_says_why(service: LocalService) -> None:
    with service.client() as client, client.open_batch(1, 2, max_replacements=0, max_given_up=3) as batch:
        batch.feed(endless(run="raise"))
        with pytest.raises(BatchFailed, match=r"3 groups in a row could not be completed: handler_failed \(\d jobs\)"):
            list(batch)
    assert batch.state == "failed"


def test_what_is_forgotten_or_no_prompt_is_said(service: LocalService) -> None:
    with service.client() as client, client.open_batch(1, 2) as batch:
        with pytest.raises(InvalidBatch, match="call `feed` first"):
            batch.next_group()
        batch.feed(["What is 1 + 1?"])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="one is a str"):
            batch.next_group()
        batch.feed(scripted(eval="alternate"))
        assert len(list(batch)) == 1
        with pytest.raises(InvalidBatch, match="has ended"):
            batch.feed([])


def test_prompts_that_cannot_even_be_read_are_left_out(service: LocalService) -> None:
    with service.client() as client, client.open_batch(1, 2) as batch:
        wrong = msgspec.structs.replace(scripted(), job_id=7)
        deep = msgspec.structs.replace(scripted(), instance={"run": [[]] * 70_000})
        batch.feed([wrong, deep, scripted(eval="alternate")])
        with pytest.raises(InvalidJob, match="job_id"):
            batch.next_group(WAIT_S)
        with pytest.raises(MalformedMessage):
            batch.next_group(WAIT_S)
        assert batch.next_group(WAIT_S) is not None


def test_a_later_batch_of_a_shorter_lease_does_not_end_the_session(service: LocalService) -> None:
    with service.client() as client, client.open_batch(1, 2), client.open_batch(1, 2, lease_s=0.5):
        with service.client() as other, other.open_batch(1, 2) as first:
            first.close()
            with other.open_batch(1, 2, lease_s=0.8) as short:
                short.feed([], last=False)
                with pytest.raises(RequestTimeout):
                    short.next_group(2.0)
                assert my_batch(other).state == "open"
        assert len([one for one in client.status().batches if one.session == client.session]) == 2


def test_a_close_whose_reply_was_lost_is_answered_again(service: LocalService) -> None:
    with service.client() as client:
        batch = client.open_batch(1, 2)
        request = batch._progress.close_request()
        until_s = time.monotonic() + WAIT_S
        first, second = (client._service.ask_frames(request, until_s)[0] for _ in range(2))
        assert bytes(first) == bytes(second)


def test_two_trainers_that_close_one_batch(service: LocalService) -> None:
    with service.client(session="shared") as one, service.client(session="shared") as other:
        batch = one.open_batch(1, 2, batch_id="both")
        same = other.open_batch(1, 2, batch_id="both")
        with pytest.raises(InvalidBatch, match="other options"):
            other.open_batch(2, 2, batch_id="both")
        batch.close()
        with pytest.raises(UnknownBatch, match="was closed"):
            same.close()
        with pytest.raises(Closed):
            batch.next_group(1.0)


def test_a_batch_of_another_session_is_none_of_ours(service: LocalService) -> None:
    with service.client() as one, service.client() as other:
        one.open_batch(1, 2, batch_id="mine")
        with pytest.raises(InvalidBatch, match="another session"):
            other.open_batch(1, 2, batch_id="mine")


def test_a_client_that_vanishes_takes_its_jobs_with_it(service: LocalService, tmp_path: Path) -> None:
    client = service.client()
    batch = client.open_batch(1, 2, lease_s=1.0)
    batch.feed([scripted(run="sleep", mark=str(tmp_path / "mark"))])
    with pytest.raises(RequestTimeout, match="0 of 1 groups are kept, 0 were not; 1 are under way with 2 jobs"):
        batch.next_group(3.0)  # longer than the lease: a thread of the client speaks for it
    assert busy_slots(service) == 2
    client.close()
    until(lambda: busy_slots(service) == 0, "the jobs of a client that is gone", WAIT_S)
    with service.client() as other:
        assert all(one.session != client.session for one in other.status().batches)


def test_stale_rollouts_are_dropped_and_made_again(service: LocalService, tmp_path: Path) -> None:
    with service.client() as client:
        with client.open_batch(1, 2, max_staleness=0) as batch:
            batch.feed([scripted(run="second waits", eval="alternate", mark=str(tmp_path / "mark"))])
            with pytest.raises(RequestTimeout):
                batch.next_group(0.5)
            until(lambda: my_batch(client).in_flight == 1, "the first rollout", WAIT_S)
            client._service.ask(WeightUpdate(new_id(), "set", 5), client._service.until())
            (tmp_path / "mark.go").touch()
            group = batch.next_group(WAIT_S)
        assert group is not None
        assert sorted(trajectory.job_id[-2:] for trajectory in group.trajectories) == [".1", ".2"]
        assert batch.report is not None
        assert batch.report.wasted == {"stale": 1}


def test_the_same_for_asyncio(service: LocalService) -> None:
    async def main() -> None:
        async with AsyncRolloutClient(service.front_door) as client:
            async with await client.open_batch(2, 2) as batch:
                batch.feed(endless(eval="alternate"))
                assert len([group async for group in batch]) == 2
            assert batch.state == "met"
            assert batch.report is not None
            with pytest.raises(InvalidBatch):
                await client.open_batch(1, 1)
        async with AsyncRolloutClient(service.front_door) as client:
            async with await client.open_batch(1, 2) as batch:
                batch.feed([], last=False)
                with pytest.raises(RequestTimeout):
                    await batch.next_group(0.2)
                unknown = msgspec.structs.replace(scripted(), task="nonesuch")
                batch.feed([unknown])
                with pytest.raises(UnknownTask):
                    await batch.next_group()
                assert await batch.next_group() is None
            assert batch.state == "short"

    asyncio.run(main())


def test_groups_larger_than_a_session_may_hold_are_refused() -> None:
    with (
        in_process(topology={"rollout_broker": SMALL}) as service,
        service.client() as client,
        pytest.raises(InvalidBatch, match="more than a session may hold"),
    ):
        client.open_batch(1, 16)


def test_prompts_beyond_the_journals_room_are_refused_and_others_go_on() -> None:
    class Full(Journal):
        """Has room for jobs, and for no prompt."""

        accepts = False

        def accept(self, *new: Any) -> None:
            self.accepts = True
            super().accept(*new)
            self.accepts = False

        def check_room(self, size_bytes: int) -> None:
            if not self.accepts:
                raise JournalFailed("the journal is full", path="/journal")

    service = in_process()
    service.brokers.journal = Full()
    with service, service.client() as client, client.open_batch(1, 2) as batch:
        batch.feed(scripted(eval="alternate"))
        with pytest.raises(JournalFailed, match="full"):
            batch.next_group(WAIT_S)
        client.submit(scripted())
        assert [one.outcome for one in client.stream(timeout_s=WAIT_S)] == ["completed"]
