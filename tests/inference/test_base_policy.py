from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.embedded_chat import encode_message, generation_prompt
from prorl_zmq.inference.embedded import base_policy
from prorl_zmq.inference.embedded.base_policy import COMMANDS, train_base_policy
from prorl_zmq.inference.policy import Policy, log_softmax
from prorl_zmq.inference.tokenizer import CALL_END, CALL_PRELUDE, IM_END, TOOL_CALL, TOOL_CALL_END, encode

pytestmark = pytest.mark.xdist_group("base policy")
NEWLINE = encode("\n")


trained_here = cache(train_base_policy)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(base_policy.base_policy, id="packaged"),
        pytest.param(trained_here, marks=pytest.mark.proof, id="trained here"),
    ],
)
def base(request: pytest.FixtureRequest) -> Policy:
    policy: Policy = request.param()
    return policy


def next_token(policy: Policy, *parts: object) -> np.ndarray:
    token_ids = np.concatenate([np.atleast_1d(part) for part in (*parts, 0)]).astype(np.int32)  # type: ignore[arg-type]
    return np.exp(log_softmax(policy.logits(policy.contexts(token_ids)[-1:])))[0]


@pytest.mark.proof(quick=True)
@pytest.mark.parametrize("question", ["How many lines are in data.txt?", "Show the first line of data.txt."])
def test_it_calls_the_tool_but_does_not_know_what_for(base: Policy, question: str) -> None:
    message = encode_message(ChatMessage(Role.USER, f"Write to answer.txt: {question}"))
    prompt = np.concatenate([message.token_ids, generation_prompt()])
    assert next_token(base, prompt)[TOOL_CALL] > 0.5
    after = next_token(base, prompt, TOOL_CALL, encode(CALL_PRELUDE))
    first_words = {int(encode(command)[0]) for command in COMMANDS}
    shares = [after[word] for word in first_words]
    assert sum(shares) > 0.9
    assert max(shares) < 0.6


@pytest.mark.proof(quick=True)
def test_it_ends_after_a_tools_answer(base: Policy) -> None:
    call = encode(f"{CALL_PRELUDE}tail -n 1 data.txt > answer.txt{CALL_END}")
    turn = np.concatenate([[TOOL_CALL], call, [TOOL_CALL_END, IM_END]]).astype(np.int32)
    answer = encode_message(ChatMessage(Role.TOOL, "[no output]")).token_ids
    after = next_token(base, turn, NEWLINE, answer, generation_prompt())
    assert after[encode("Done.")[0]] > 0.8


@pytest.mark.proof(quick=True)
def test_it_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_policy, "_STEPS", 3)
    first, second = train_base_policy(5), train_base_policy(5)
    for name, value in first.parameters.items():
        np.testing.assert_array_equal(value, second.parameters[name])


@pytest.mark.proof
def test_the_packaged_one_is_what_training_gives() -> None:
    """But for what processors and BLAS libraries round otherwise."""
    packaged, trained = base_policy.base_policy(), trained_here()
    for name, value in packaged.parameters.items():
        np.testing.assert_allclose(value, trained.parameters[name], atol=1e-3)


def test_no_command_needs_an_escape_in_json() -> None:
    assert not {character for command in COMMANDS for character in command} & {'"', "\\"}
