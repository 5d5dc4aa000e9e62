"""What a watcher is shown of a batch, from a sampler's own records."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.brokers.batches import batch_registry
from prorl_zmq.brokers.batches import batch_view as module
from prorl_zmq.brokers.batches.batch_records import Launch, RememberedBatch
from prorl_zmq.brokers.batches.batch_sampler import BatchSampler
from prorl_zmq.brokers.batches.batch_view import batch_view, closed_view
from prorl_zmq.brokers.batches.group_filters import KeepInformative
from prorl_zmq.brokers.batches.prompt import Prompt
from prorl_zmq.brokers.batches.rollout_group import Rollout
from prorl_zmq.errors import UnknownBatch
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.batches import BatchOptions
from prorl_zmq.wire.messages.front_door import FrontDoorReply
from prorl_zmq.wire.messages.jobs import Job
from prorl_zmq.wire.messages.watching import BatchView, RolloutCell


class Batch:
    """One session's sampler, and its open batch."""

    def __init__(self, name: str = "b", target: int = 2, size: int = 2, **more: Any) -> None:
        self.sampler = BatchSampler(lambda prompt: prompt.job.job_id)
        self.running: list[str] = []
        self.now = 0.0
        self.open(name, target, size, **more)

    def open(self, name: str, target: int = 2, size: int = 2, **more: Any) -> None:
        self.name = name
        options = BatchOptions(target_groups=target, group_size=size, **more)
        self.sampler.open("s", name, options, KeepInformative(), self.now, key=f"key-{name}")

    def feed(self, *names: str, last: bool = False) -> None:
        prompts = [
            Prompt(n, "s", Job(task="math", instance={}, job_id=name), 10) for n, name in enumerate(names, start=1)
        ]
        self.sampler.feed(self.name, prompts, 0.0, last=last)

    def launch(self, room: int) -> None:
        left = iter([True] * room)
        actions = self.sampler.launch(lambda _: next(left, False), 0.0)
        self.running += [action.job_id for action in actions if isinstance(action, Launch)]

    def complete(self, *rewards: float, version: int = 0) -> None:
        for reward in rewards:
            self.sampler.job_completed(Rollout(self.running.pop(0), reward, 10, version, 1.5), self.now)

    def view(self, name: str = "") -> BatchView:
        batch, version = self.sampler.registry.look_for(name or self.name), self.sampler.registry.version
        if isinstance(batch, RememberedBatch):
            view = closed_view("r", batch, version, wall)
        else:
            view = batch_view("r", batch, batch.status(), version, lambda job_id: 30.0 + int(job_id[-1]), wall)
        assert codec.decode(codec.encode(view), FrontDoorReply) == view
        return view


def wall(time: float | None) -> float | None:
    return time + 1000.0 if time is not None else None


def test_each_place_of_a_group_says_what_fills_it() -> None:
    batch = Batch(size=4)
    batch.sampler.set_version(3, 0.0)
    batch.feed("p", "q")
    batch.launch(3)
    batch.complete(0.5, version=1)
    batch.sampler.set_version(5, 0.0)
    view = batch.view()
    (group,) = view.groups
    assert (group.prompt_id, group.state, group.carried_over, group.failed) == ("p", "under_way", False, 0)
    assert group.group_id == "key-b.1"
    assert group.cells == (
        RolloutCell("in", "key-b.1.0", 0.5, 4, 1.5),
        RolloutCell("running", "key-b.1.1", staleness=2, seconds=31.0),
        RolloutCell("running", "key-b.1.2", staleness=2, seconds=32.0),
        RolloutCell("missing"),
    )
    assert (view.current_version, view.left_out, view.status.prompts) == (5, 0, 1)
    assert view.waits_for == (
        "2 more groups to be kept: 2 rollouts under way, the longest key-b.1.2 (32 s), key-b.1.1 (31 s); "
        "slots for 1 more rollout of its groups; slots for 1 prompt"
    )


def test_what_a_batch_waits_for() -> None:
    batch = Batch(target=2, size=2, adopt=True)
    assert batch.view().waits_for == "2 more groups to be kept: prompts from its client"
    batch.feed("p", "q")
    batch.launch(2)
    batch.complete(0.0, 1.0)
    assert [group.state for group in batch.view().groups] == ["kept"]
    assert batch.view().waits_for == "1 more group to be kept: slots for 1 prompt"
    batch.launch(2)
    batch.complete(1.0, 1.0)  # all the same: not kept
    assert batch.view().waits_for == "1 more group to be kept: prompts from its client"
    batch.feed("r")
    batch.launch(2)
    assert "2 rollouts under way" in batch.view().waits_for
    batch.complete(0.0, 1.0)
    view = batch.view()
    assert (view.status.state, view.report.dropped_groups) == ("met", 1)
    assert view.waits_for == "its client, which has not acknowledged 2 groups"
    kept = list(batch.sampler.registry.batch("b").ready.values())
    batch.sampler.mark_given(kept[0], "client", 0.0)
    assert [group.state for group in batch.view().groups] == ["given", "kept"]
    batch.sampler.acknowledge("b", [group.group_id for group in kept])
    assert (batch.view().waits_for, batch.view().groups) == ("its client, to close it", ())


def test_a_group_of_an_earlier_batch_is_named_as_one() -> None:
    batch = Batch("first", size=4)
    batch.feed("p")
    batch.launch(2)
    batch.complete(1.0)
    batch.sampler.close("first", 0.0)
    batch.open("second", size=4)
    batch.feed("q")
    batch.launch(4)
    assert [(row.prompt_id, row.carried_over) for row in batch.view().groups] == [("p", True), ("q", False)]


def test_of_a_closed_batch_it_is_known_what_it_came_to_and_which_jobs_were_its_own() -> None:
    batch = Batch("first", target=1, size=2)
    batch.feed("p", "q")
    batch.launch(4)
    batch.now = 5.0
    batch.complete(0.0, 1.0)
    batch.now = 7.0
    batch.sampler.close("first", 7.0)
    first = batch.view("first")
    assert (first.is_closed, first.status.state, first.status.in_flight, first.groups) == (True, "met", 0, ())
    assert (first.waits_for, first.report.kept_groups, first.report.carried) == ("", 1, 4)
    assert (first.begins, first.taken_over, first.rollouts) == ("key-first.", (), 4)
    assert (first.opened_at, first.ended_at) == (1000.0, 1005.0)  # when it was met, not when it was closed

    batch.now = 8.0
    batch.open("second", target=2, size=2)
    batch.launch(1)
    second = batch.view()
    assert (second.is_closed, second.ended_at, second.opened_at) == (False, None, 1008.0)
    assert sorted(second.taken_over) == ["key-first.1", "key-first.2"]
    assert (second.report.adopted, second.rollouts) == (4, 2)  # two of them had ended before
    batch.now = 9.0
    batch.sampler.close("second", 9.0)
    assert batch.view("second").ended_at == 1009.0


def test_a_batch_whose_client_is_gone_is_remembered_as_a_closed_one() -> None:
    batch = Batch()
    batch.feed("p")
    batch.launch(1)
    batch.sampler.close_session("s", 3.0)
    view = batch.view()
    assert (view.is_closed, view.ended_at, view.status.in_flight, view.rollouts) == (True, 1003.0, 0, 1)


def test_batches_are_looked_for_by_the_beginning_of_an_id(monkeypatch: Any) -> None:
    monkeypatch.setattr(batch_registry, "REMEMBERED_LIMIT", 2)
    batch = Batch("step-1")
    for number in (2, 3, 4):
        batch.sampler.close(batch.name, 0.0)
        batch.open(f"step-{number}")
    assert (batch.view("step-4").is_closed, batch.view("step-3").is_closed) == (False, True)
    with pytest.raises(
        UnknownBatch, match=r"3 batches have an id that begins with step: step-2, step-3, step-4; "
    ) as refused:
        batch.view("step")
    assert refused.value.fields["matches"] == 3
    with pytest.raises(UnknownBatch, match="no batch step-1: it was never opened here, or it was closed so long ago"):
        batch.view("step-1")
    batch.sampler.close("step-4", 0.0)
    batch.open("step-4")
    assert not batch.view("step-4").is_closed  # the open one comes first


def test_what_a_reply_cannot_hold_is_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "CELLS_LIMIT", 5)
    batch = Batch(size=2)
    batch.feed("p", "q", "r")
    batch.launch(6)
    view = batch.view()
    assert ([row.prompt_id for row in view.groups], view.left_out) == (["p", "q"], 1)
