"""What the batches leave in the journal, whole and damaged."""

from __future__ import annotations

from collections import Counter

import pytest

from prorl_zmq import Job
from prorl_zmq.brokers.batches.batch_notes import (
    Restored,
    batch_note,
    group_note,
    prompt_note,
    read_notes,
    session_note,
    weights_note,
)
from prorl_zmq.brokers.batches.batch_records import BatchRecord, SessionRecord
from prorl_zmq.brokers.batches.group_filters import KeepInformative
from prorl_zmq.brokers.batches.prompt import Prompt
from prorl_zmq.brokers.batches.rollout_group import Rollout, RolloutGroup
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.batches import BatchOptions

JOB = Job(task="math", instance={"problem": "1 + 1"}, job_id="prompt")
ROLLOUT = Rollout("key.1.0", 1.0, 10, 2, 3.0, (("white", 1.0), ("black", -1.0)), records=("experts",))


def notes() -> dict[str, bytes]:
    """A batch with a group under way, and a prompt that waits."""
    prompts = [Prompt(number, "s", JOB, len(codec.encode(JOB))) for number in (7, 8)]
    batch = BatchRecord("b", "s", BatchOptions(target_groups=2, group_size=3), KeepInformative(), "key")
    batch.fed, batch.opened = 2, 1
    group = RolloutGroup("key.1", prompts[0], 3, 1, "s", "b")
    group.rollouts = {0: ROLLOUT}
    group.running = {"key.1.1": 1}
    group.failures, group.started = Counter({"timeout": 1}), 3
    kept = [session_note(SessionRecord("s", 0.0, 30.0)), batch_note(batch), group_note(group)]
    kept += [prompt_note(prompt, "b", codec.encode(JOB)) for prompt in prompts]
    return dict([*kept, weights_note("policy", 5), weights_note("b", 8)])


def read(kept: dict[str, bytes]) -> Restored:
    return read_notes(kept, lambda job_id: job_id in ("key.1.0", "key.1.1"), 100.0)


def test_everything_comes_back() -> None:
    restored = read(notes())
    (batch,), (group,) = restored.batches, restored.groups
    assert (batch.options.group_size, batch.fed, batch.key, batch.opened) == (3, 2, "key", 1)
    assert [prompt.number for prompt in batch.prompts] == [8]
    assert group.prompt.job == JOB
    assert group.rollouts == {0: ROLLOUT}
    assert group.running == {"key.1.1": 1}
    assert (group.failures, group.started) == ({"timeout": 1}, 3)
    assert restored.versions == {"policy": 5, "b": 8}


def test_what_is_not_there_any_more_is_run_again() -> None:
    (group,) = read_notes(notes(), lambda _: False, 0.0).groups
    assert (group.rollouts, group.running) == ({}, {})


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x90", b"\xff" * 100])
@pytest.mark.parametrize("name", sorted(notes()))
def test_a_damaged_note_costs_what_it_was_of(name: str, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    restored = read({**notes(), name: damage})
    kind = name.partition(":")[0]
    if damage != b"\xff" * 100 or kind != "weights":  # those are a number
        assert f"note {name} is damaged" in caplog.text
    groups = [group.group_id for group in restored.groups]
    if kind in ("session", "group") or name == "prompt:7":
        assert groups == []
    else:
        assert groups == ["key.1"]
    if kind == "batch":
        assert restored.groups[0].batch_id == ""  # carried over
        assert [prompt.number for prompt in restored.sessions["s"].prompts["policy"]] == [8]
    if kind == "group":
        assert [prompt.number for prompt in restored.batches[0].prompts] == [7, 8]  # run again


def test_strange_names_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    strange = {"nonesuch": b"x", "prompt:seven": b"\x90", "": b"", "group": b"\x90"}
    assert len(read({**notes(), **strange}).groups) == 1
    assert caplog.text.count("is damaged") == len(strange)
