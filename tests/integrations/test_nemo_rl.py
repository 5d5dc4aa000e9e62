from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from finished_groups import Turn, chat, group, groups, rewritten, trajectory, with_tool
from hypothesis import given

from prorl_zmq.data.rows import rows_of
from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import NotTrainable
from prorl_zmq.integrations.nemo_rl import message_log, rollout_batch, tensors, train_arrays

if TYPE_CHECKING:
    from prorl_zmq import Group


def test_a_message_log() -> None:
    log = message_log(rows_of([group("a", with_tool())])[0])
    assert [(message["role"], message["token_ids"].tolist()) for message in log] == [
        ("system", [1]),
        ("user", [2, 3, 9]),
        ("assistant", [10, 11]),
        ("environment", [8, 20, 21, 9]),
        ("assistant", [12]),
    ]
    assert [message.get("generation_logprobs", np.zeros(0)).tolist() for message in log] == [
        [],
        [],
        [-0.25, -0.5],
        [],
        [-1.0],
    ]
    assert {message["token_ids"].dtype.name for message in log} == {"int64"}


def test_what_the_policy_did_not_say_is_never_an_assistants() -> None:
    turns = [
        Turn(Role.ASSISTANT, [5, 6]),  # an example in the prompt
        Turn(Role.USER, [2]),
        Turn(Role.ASSISTANT, [9], [(10, -0.5, 0)]),
        Turn(Role.ASSISTANT, [7]),  # what the template puts behind an answer
        Turn(Role.TOOL, [8]),
        Turn(Role.ASSISTANT, [9], [(11, -0.5, 0)]),
    ]
    log = message_log(rows_of([group("a", trajectory(turns))])[0])
    assert [(message["role"], message["token_ids"].tolist()) for message in log] == [
        ("user", [5, 6, 2, 9]),
        ("assistant", [10]),
        ("environment", [7, 8, 9]),
        ("assistant", [11]),
    ]


@given(groups())
def test_messages_lie_end_to_end_and_train_what_was_generated(batch: list[Group]) -> None:
    for row in rows_of(batch):
        log = message_log(row)
        assert np.concatenate([message["token_ids"] for message in log]).tolist() == row.arrays.token_ids.tolist()
        trained = [np.full(len(message["token_ids"]), message["role"] == "assistant") for message in log]
        assert np.concatenate(trained).tolist() == row.arrays.loss_mask.tolist()
        said = [message["generation_logprobs"] for message in log if message["role"] == "assistant"]
        assert np.concatenate(said).tolist() == row.arrays.logprobs[row.arrays.loss_mask].tolist()
        assert all(len(message["token_ids"]) for message in log)


def test_the_columns_of_a_batch() -> None:
    batch = [group("a", chat([1], [2], 0.0, stop_reason="max_tokens", version=3)), group("b", with_tool(1.0))]
    columns = rollout_batch(batch)
    columns.pop("message_log")
    assert {key: value if isinstance(value, list) else value.tolist() for key, value in columns.items()} == {
        "length": [2, 4],
        "loss_multiplier": [1.0, 1.0],
        "total_reward": [0.0, 1.0],
        "truncated": [True, False],
        "idx": [0, 1],
        "task_name": ["math", "math"],
        "extra_env_info": [{}, {}],
        "weight_version": [3, 4],
    }
    assert rollout_batch(batch, task_name="sums")["task_name"] == ["sums", "sums"]


def test_the_arrays_of_the_loss() -> None:
    batch = [group("a", chat([1], [2], 0.0), chat([1], [2, 3], 1.0)), group("b", chat([4, 5, 6], [7], 0.5))]
    arrays = train_arrays(batch, pad_id=77, multiple_of=8)
    assert arrays["input_ids"].tolist() == [
        [1, 9, 2, 77, 77, 77, 77, 77],
        [1, 9, 2, 3, 77, 77, 77, 77],
        [4, 5, 6, 9, 7, 77, 77, 77],
    ]
    assert arrays["input_lengths"].tolist() == [3, 4, 5]
    assert arrays["token_mask"].sum(1).tolist() == [1, 2, 1]
    assert arrays["generation_logprobs"][1].tolist() == [0, 0, -0.5, -1, 0, 0, 0, 0]
    assert arrays["sample_mask"].tolist() == [1, 1, 1]
    assert arrays["total_reward"].tolist() == [0, 1, 0.5]
    assert arrays["prompt_ids_for_adv"].tolist() == [[0], [0], [1]]


def test_one_groups_prompts_may_differ_and_two_groups_be_alike() -> None:
    batch = [group("a", chat([1], [2], 0.0), chat([3], [2], 1.0)), group("b", chat([1], [7], 0.5))]
    assert train_arrays(batch, pad_id=0)["prompt_ids_for_adv"].tolist() == [[0], [0], [1]]


def test_several_segments_are_refused() -> None:
    for call in (rollout_batch, lambda batch: train_arrays(batch, pad_id=0)):
        with pytest.raises(NotTrainable, match=r"job x has several segments.*history = 'append'"):
            call([group("a", rewritten(job_id="x"))])


def test_columns_as_tensors() -> None:
    torch = pytest.importorskip("torch", reason="the tensors need torch: install the extra `train`")
    columns = tensors(rollout_batch([group("a", with_tool())]))
    assert columns["total_reward"].dtype == torch.float32
    assert columns["message_log"][0][2]["token_ids"].tolist() == [10, 11]
    assert columns["message_log"][0][2]["role"] == "assistant"
    assert tensors(train_arrays([group("a", with_tool())], pad_id=0))["input_ids"].dtype == torch.int64
