"""What a watcher is shown of a batch, from a sampler's own records."""

from __future__ import annotations

from typing import Any

from prorl_zmq.brokers.batches import batch_view as module
from prorl_zmq.brokers.batches.batch_records import Launch
from prorl_zmq.brokers.batches.batch_sampler import BatchSampler
from prorl_zmq.brokers.batches.batch_view import batch_view
from prorl_zmq.brokers.batches.group_filters import KeepInformative
from prorl_zmq.brokers.batches.prompt import Prompt
from prorl_zmq.brokers.batches.rollout_group import Rollout
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
        self.open(name, target, size, **more)

    def open(self, name: str, target: int = 2, size: int = 2, **more: Any) -> None:
        self.name = name
        options = BatchOptions(target_groups=target, group_size=size, **more)
        self.sampler.open("s", name, options, KeepInformative(), 0.0, key=f"key-{name}")

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
            self.sampler.job_completed(Rollout(self.running.pop(0), reward, 10, version, 1.5), 0.0)

    def view(self) -> BatchView:
        batch = self.sampler.registry.batch(self.name)
        view = batch_view("r", batch, batch.status(), self.sampler.version, lambda job_id: 30.0 + int(job_id[-1]))
        assert codec.decode(codec.encode(view), FrontDoorReply) == view
        return view


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


def test_what_a_reply_cannot_hold_is_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "CELLS_LIMIT", 5)
    batch = Batch(size=2)
    batch.feed("p", "q", "r")
    batch.launch(6)
    view = batch.view()
    assert ([row.prompt_id for row in view.groups], view.left_out) == (["p", "q"], 1)
