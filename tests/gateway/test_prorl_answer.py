"""What ProRL's clients read out of a trajectory."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
from finished_groups import Turn, chat, rewritten, trajectory, with_tool
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq import Job
from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.gateway.message_texts import MessageTexts
from prorl_zmq.gateway.prorl_answer import answer, failure, messages
from prorl_zmq.gateway.prorl_bodies import Processed, ProrlMessage
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat, encode_message, generation_prompt
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Outcome

JOB = Job(task="math", instance={"problem": "1", "ground_truth": "1", "tools": ["bash", "finish"]})


def told(ended: Trajectory) -> dict[str, Any]:
    """Return the answer for a trajectory, which is what the OpenAPI document says."""
    found = answer({"instance_id": "i", "trajectory_id": 3}, "mine", JOB, ended, None)
    check_described(found)
    return found


def check_described(found: dict[str, Any]) -> None:
    for kind, each in ((Processed, found), *((ProrlMessage, message) for message in found["messages"])):
        fields = {field.name: field.required for field in msgspec.structs.fields(kind)}
        assert each.keys() <= fields.keys()
        assert {name for name, required in fields.items() if required} <= each.keys()
    msgspec.convert(found, Processed)


def test_a_failure_is_described_too() -> None:
    check_described(failure({"instance_id": "i"}, None, "no such row", "init"))


def test_tokens_around_the_policys_own_belong_to_the_messages_beside() -> None:
    found = told(with_tool())["messages"]
    assert [(one["role"], one["token_ids"]) for one in found] == [
        ("system", [1]),
        ("user", [2, 3, 9]),
        ("assistant", [10, 11]),
        ("tool", [8, 20, 21, 9]),
        ("assistant", [12]),
    ]
    assert found[-1]["input_ids"] == [1, 2, 3, 9, 10, 11, 8, 20, 21, 9]
    assert found[2]["logprobs"] == [-0.25, -0.5]


turns = st.lists(
    st.builds(
        Turn,
        st.sampled_from(Role),
        st.lists(st.integers(0, 99), max_size=3),
        st.lists(st.tuples(st.integers(0, 99), st.just(-0.5), st.just(0)), max_size=3),
    ),
    min_size=1,
    max_size=8,
)


@given(turns)
def test_messages_together_are_the_exact_sequence_and_assistants_its_mask(given_turns: list[Turn]) -> None:
    """Up to the last token that the policy generated: behind it verl reads nothing."""
    said = [turn if turn.role == Role.ASSISTANT else Turn(turn.role, turn.context) for turn in given_turns]
    (arrays,) = trajectory(said).segments()
    found = messages(arrays, None)
    end = int(np.flatnonzero(arrays.loss_mask).max(initial=-1)) + 1
    assert list(chain(*(one["token_ids"] for one in found))) == arrays.token_ids[:end].tolist()
    mask = [one["role"] == "assistant" for one in found for _ in one["token_ids"]]
    assert mask == arrays.loss_mask[:end].tolist()
    logprobs = [p for one in found for p in one.get("logprobs", [0.0] * len(one["token_ids"]))]
    assert logprobs == arrays.logprobs[:end].tolist()


def test_of_several_segments_the_last_is_told_and_said() -> None:
    found = told(rewritten())
    assert found["notes"]["segments"].startswith("the last of 2")
    assert found["messages"][0]["token_ids"][0] == 2
    assert found["error"] is None


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"outcome": Outcome.TIMEOUT, "stop_reason": ""}, "timeout"),
        ({"outcome": Outcome.INFRASTRUCTURE_ERROR, "stop_reason": ""}, "run"),
        ({"outcome": Outcome.INFRASTRUCTURE_ERROR, "stop_reason": "done"}, "eval"),
    ],
)
def test_a_rollout_without_a_reward_has_no_messages(fields: dict[str, Any], where: str) -> None:
    found = told(chat([1], [2], None, error=ErrorInfo("lease_lost", "it died"), **fields))
    assert (found["messages"], found["critical_error"], found["error"]) == ([], where, "it died")
    assert (found["resolved"], found["filter"]) == (False, True)


def test_a_rollout_that_ended_before_its_first_token_failed_in_init() -> None:
    ended = trajectory([], None, outcome=Outcome.FAILED, stop_reason="", error=ErrorInfo("sandbox_failed", "no"))
    assert (told(ended)["critical_error"], told(ended)["messages"]) == ("init", [])


def test_an_agents_own_failure_keeps_its_messages() -> None:
    found = told(chat([1], [2], 0.0, outcome=Outcome.FAILED, error=ErrorInfo("sandbox_limit_exceeded", "memory")))
    assert (found["critical_error"], found["success"], found["error"]) == (None, False, "memory")
    assert found["messages"]


def test_the_heads_are_those_of_the_instance() -> None:
    found = told(chat([1], [2], stop_reason="max_turns"))
    assert (found["instance_id"], found["trajectory_id"], found["job_id"]) == ("i", 3, "mine")
    assert (found["resolved"], found["finish"], found["end_properly"]) == (True, False, False)
    assert [tool["function"]["name"] for tool in found["tools"]] == ["bash", "finish"]


def test_texts_are_without_the_template() -> None:
    chat_format = EmbeddedChatFormat()
    bash = {"type": "function", "function": {"name": "bash"}}
    call = chat_format.conversation([ChatMessage(Role.USER, "x")], [bash])
    call.prompt()
    generated = np.array([3, 265, 283, 292, 309, 296, 313, 266, 4, 2], np.int32)  # a call of bash, and its end
    assert len(call.add_turn(generated).calls) == 1
    call.add_tool_results(["the tool's answer"])
    behind = next(piece for piece in call.prompt().pieces if piece.role == Role.TOOL).token_ids
    ended = trajectory(
        [
            Turn(Role.USER, encode_message(ChatMessage(Role.USER, "what is 1 + 1?")).token_ids.tolist()),
            Turn(Role.ASSISTANT, generation_prompt().tolist(), [(int(one), -0.1, 0) for one in generated]),
            Turn(Role.TOOL, behind.tolist()),
            Turn(Role.ASSISTANT, generation_prompt().tolist(), [(54, -0.1, 0), (2, -0.1, 0)]),
        ]
    )
    (arrays,) = ended.segments()
    found = messages(arrays, MessageTexts(chat_format, ChatSettings()))
    assert [(one["role"], one["content"]) for one in found] == [
        ("user", "what is 1 + 1?"),
        ("assistant", ""),
        ("tool", "the tool's answer"),
        ("assistant", "1"),
    ]
    assert [call["name"] for call in found[1]["tool_calls"]] == ["bash"]
