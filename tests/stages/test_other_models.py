"""Conversations with other models than the policy, through a whole service: a simulated user, and an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from support.chat_server import ChatServer, chat_server
from support.waiting import until

from prorl_zmq import Job, NamedModel, Role, Sampling
from prorl_zmq.data.rows import TRUNCATING
from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.stages.chat_endpoint import ChatEndpoint, endpoints
from prorl_zmq.stages.endpoint_chat import EndpointChat
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq.testing import LocalService, say
from prorl_zmq.tools.tool import Arguments, Tool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Trajectory
    from prorl_zmq.stages.handler import EvalPhase, PhaseData, RunPhase

WAIT_S = 60.0


class Look(Arguments):
    """What to look at."""

    at: str


class LookTool(Tool[Look]):
    name = "look"
    description = "Looks."
    takes = Look

    async def call(self, arguments: Look, timeout_s: float) -> str:
        return f"{arguments.at} is fine"


class Instance(msgspec.Struct):
    turns: int = 2
    persona: str = "You want help."


class Support(AgentHandler[Instance]):
    """The policy helps a user, whom another model plays; a critic at an endpoint has the last word."""

    task = "support"
    instance_type = Instance

    async def run(self, phase: RunPhase[Instance]) -> PhaseData:
        agent = phase.conversation([ChatMessage(Role.SYSTEM, "Help.")])
        user = phase.conversation([ChatMessage(Role.SYSTEM, "You want help.")], name="user", model="user")
        said = (await user.say("Begin.")).text
        for _ in range(phase.instance.turns):
            answer = await agent.say(said)
            said = (await user.say(answer.text)).text
        critic = phase.conversation([], [LookTool()], name="critic", model="critic")
        verdict = await critic.say(f"The user said: {said}")
        return {"said": said, "verdict": verdict.text, "critic_turns": len(critic.turns)}

    async def eval(self, phase: EvalPhase[Instance]) -> Evaluation:
        data = phase.data
        return Evaluation(
            1.0, notes={"said": data["said"], "verdict": data["verdict"]}, metrics={"n": data["critic_turns"]}
        )


def user_says(prompt: str) -> str:
    number = prompt.count("answer")
    return f"question {number}" + (" ###STOP###" if number == 2 else "")


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with chat_server() as url, pytest.MonkeyPatch.context() as patched:
        patched.setenv("PRORL_MODEL_CRITIC_URL", url)
        patched.setenv("PRORL_MODEL_CRITIC_MODEL", "big-critic")
        patched.setenv("PRORL_MODEL_HALF_URL", url)
        patched.setenv("PRORL_MODEL_GPT_4_1_URL", url)
        patched.setenv("PRORL_MODEL_GPT_4_1_MODEL", "gpt-4.1-2025")
        engine = say(lambda prompt: f"answer {prompt.count('question')}")
        with LocalService(handlers={"support": Support}, engine=engine, models={"sim": say(user_says)}) as running:
            yield running


def run(service: LocalService, **changes: Any) -> Trajectory:
    job = Job(**({"task": "support", "instance": {}, "models": {"user": "sim"}} | changes))
    with service.client(timeout_s=WAIT_S) as client:
        client.submit(job)
        (trajectory,) = client.stream()
        until(lambda: not any(one.in_flight for one in client.backends.list()), "the backends are released")
    return trajectory


def test_turns_of_a_simulated_user_are_context_for_the_policy_and_not_in_the_arrays(service: LocalService) -> None:
    trajectory = run(service)
    assert trajectory.outcome == "completed", trajectory.error
    notes, metrics = trajectory.result.notes, trajectory.result.metrics
    assert notes["said"] == "question 2 ###STOP###"
    assert "question 0" in notes["conversation user"]
    assert metrics["turns"] == 2, "of the policy"
    assert len(trajectory.segments()) == 1
    assert trajectory.result.backend == "local"
    text = "".join(map(chr, trajectory.token_ids.clip(0, 0x10FFFF)))
    assert trajectory.token_ids[trajectory.loss_mask].size > 0
    assert "You want help." not in text
    assert np.isfinite(trajectory.logprobs).all()


def test_the_model_of_a_job_takes_its_turns_and_the_policy_may_be_another_ones_user(service: LocalService) -> None:
    trajectory = run(service, model="sim", models={"user": "policy"})
    assert trajectory.outcome == "completed", trajectory.error
    assert (trajectory.result.model, trajectory.result.backend) == ("sim", "local-sim")
    assert trajectory.result.notes["said"] == "answer 2", "the policy plays the user"
    assert trajectory.result.metrics["turns"] == 2
    assert len(trajectory.segments()) == 1, "the user is not trained"


def test_self_play_of_another_model_trains_both_sides(service: LocalService) -> None:
    trajectory = run(service, model="sim", models={"user": "sim", "critic": "policy"})
    assert trajectory.outcome == "completed", trajectory.error
    trained = {part.name: part.trained for part in trajectory.result.conversations}
    assert trained == {"main": True, "user": True, "critic": False}
    assert trajectory.result.backend == "local-sim"


def test_an_endpoint_calls_tools_as_the_policy_does(service: LocalService) -> None:
    ChatServer.asked.clear()
    trajectory = run(service, models={"user": NamedModel("sim", Sampling(temperature=0)), "critic": "critic"})
    assert trajectory.result.notes["verdict"] == "I heard it is fine"
    assert trajectory.result.metrics["n"] == 2
    first, second = (body for _, body in ChatServer.asked)
    assert first["tools"][0]["function"]["name"] == "look"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["tool_calls"][0]["id"] == second["messages"][2]["tool_call_id"]
    assert trajectory.result.stop_reason not in TRUNCATING


@pytest.mark.parametrize("name", ["gpt-4.1", "gpt_4_1", "GPT-4-1"])
def test_a_models_variables_have_one_spelling_for_all_its_names(service: LocalService, name: str) -> None:
    ChatServer.asked.clear()
    trajectory = run(service, models={"user": "sim", "critic": name})
    assert trajectory.outcome == "completed", trajectory.error
    assert {body["model"] for _, body in ChatServer.asked} == {"gpt-4.1-2025"}


def test_a_failure_of_an_endpoint_is_no_fault_of_the_policys_backend(service: LocalService) -> None:
    trajectory = run(service, models={"user": "sim", "critic": "half"}, max_attempts=1)
    assert trajectory.outcome == "infrastructure_error"
    assert "no model half is configured: set PRORL_MODEL_HALF_MODEL" in str(trajectory.error)
    assert trajectory.reward is None
    with service.client(timeout_s=WAIT_S) as client:
        assert {one.state for one in client.backends.list()} == {"ready"}


def test_a_role_that_the_job_maps_to_the_policy_is_played_by_it(service: LocalService) -> None:
    trajectory = run(service, models={"user": "policy"})
    assert trajectory.outcome == "completed", trajectory.error
    assert trajectory.result.metrics["turns"] == 5
    assert len(trajectory.segments()) == 2, "self-play: both conversations are trained"


def test_the_models_of_the_environment_are_named_by_its_variables() -> None:
    variables = {"PRORL_MODEL_SIM_URL": "http://a", "PRORL_MODEL_MY_RM_URL": "http://b", "PRORL_MODEL_OLD_URL": " "}
    variables |= {"PRORL_MODEL_POLICY_URL": "http://c", "PRORL_MODEL_SIM_KEY": "k", "PRORL_JUDGE_URL": "http://d"}
    assert endpoints(variables) == ("my_rm", "sim")


def test_a_conversation_with_an_endpoint_is_lines_of_bytes_and_read_back() -> None:
    chat = EndpointChat(ChatEndpoint("x", {}), "x")
    pieces = chat.opening([ChatMessage(Role.USER, "ünï\n{}")], [{"name": "look", "parameters": {}}])
    assert [piece.role for piece in pieces] == [Role.SYSTEM, Role.USER]
    assert all(piece.token_ids.dtype == np.int32 for piece in pieces)
    calls = b'[{"name":"look","arguments":"{\\"at\\": 1}"},{"name":"no","arguments":"x"}]'
    line = b'{"role":"assistant","content":"hi","calls":' + calls + b"}\n"
    read = chat.read_turn(np.frombuffer(line, np.uint8).astype(np.int32))
    assert read.content == "hi"
    assert read.calls[0] == ToolCall("look", {"at": 1})
    assert isinstance(read.calls[1], MalformedCall)
    with pytest.raises(ConfigError, match="set PRORL_MODEL_X_URL and PRORL_MODEL_X_MODEL "):
        chat.endpoint._opened()


def test_an_endpoints_texts_may_have_any_line_separators() -> None:
    chat = EndpointChat(ChatEndpoint("x", {}), "x")
    text = "one\u2028two\u2029three\u0085four\r\nfive"
    line = msgspec.json.encode({"role": "assistant", "content": text}) + b"\n"
    assert chat.decode(np.frombuffer(line, np.uint8).astype(np.int32)) == text
