"""Programs that call other models than the policy, through a whole service: backends of a name, and an endpoint."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from support.chat_server import ChatServer, chat_server
from support.waiting import until

from prorl_zmq import Job, NamedModel, RolloutClient, Sampling
from prorl_zmq.errors import InvalidJob
from prorl_zmq.testing import LocalService, say

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 30.0
MODELS = {"user": NamedModel("sim", Sampling(temperature=0)), "openai/gpt-4.1": "critic", "me": "policy"}
SECRET = "secret-of-the-critic"


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with chat_server() as url, pytest.MonkeyPatch.context() as patched:
        patched.setenv("PRORL_MODEL_CRITIC_URL", url)
        patched.setenv("PRORL_MODEL_CRITIC_MODEL", "big-critic")
        patched.setenv("PRORL_MODEL_CRITIC_KEY", SECRET)
        engines = {"sim": say(lambda prompt: f"I simulate {prompt.count('user')}")}
        with LocalService(engine=say(lambda _prompt: "I am the policy"), models=engines, slots=4) as running:
            yield running


@pytest.fixture
def client(service: LocalService) -> Iterator[RolloutClient]:
    with service.client(timeout_s=WAIT_S) as connected:
        yield connected


def job(**changes: Any) -> Job:
    return Job(task="outside", instance={"prompt": "Help the user."}, **({"models": MODELS} | changes))


def ask(rollout: Any, model: str, *messages: dict[str, Any] | str, **more: Any) -> tuple[int, dict[str, Any]]:
    given = [one if isinstance(one, dict) else {"role": "user", "content": one} for one in messages]
    data = json.dumps({"model": model, "messages": given, **more}).encode()
    headers = {"Authorization": f"Bearer {rollout.api_key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{rollout.base_url}/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=WAIT_S) as response:
            return response.status, json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def said(rollout: Any, model: str, *messages: dict[str, Any] | str, **more: Any) -> str:
    status, message = ask(rollout, model, *messages, **more)
    assert status == 200, message
    return str(message["content"])


def in_flight(client: RolloutClient) -> dict[str, int]:
    return {one.backend.backend_id: one.in_flight for one in client.backends.list()}


def test_each_name_is_answered_by_its_model_and_only_the_policy_is_in_the_trajectory(client: RolloutClient) -> None:
    with client.endpoint(job()) as rollout:
        assert said(rollout, "policy", "Help the user.") == "I am the policy"
        user = said(rollout, "user", "You are a user.")
        assert user.startswith("I simulate")
        again = said(rollout, "user", "You are a user.", {"role": "assistant", "content": user}, "More.")
        assert again.startswith("I simulate")
        assert again != user, "it saw its own conversation"
        assert said(rollout, "me", "Am I you?") == "I am the policy"
        assert said(rollout, "gpt-5", "And you?") == "I am the policy"
        assert in_flight(client) == {"local": 1, "local-sim": 1}
        trajectory = rollout.finish(reward=1.0)
    metrics, timings = trajectory.result.metrics, trajectory.result.timings
    assert metrics["turns"] == 3
    assert metrics["model.user.turns"] == 2
    assert metrics["calls_of_another_model"] == 1, "the name that nothing maps, and not the one that is the policy's"
    assert timings["model.user"] > 0
    text = "".join(map(chr, trajectory.token_ids.clip(0, 0x10FFFF)))
    assert len(trajectory.segments()) == 3
    assert "simulate" not in text
    until(lambda: in_flight(client) == {"local": 0, "local-sim": 0}, "both assignments are released")


def test_an_endpoint_of_the_environment_answers_with_text_and_calls(client: RolloutClient) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    ChatServer.asked.clear()
    with client.endpoint(job()) as rollout:
        said(rollout, "policy", "Help the user.")
        _, message = ask(rollout, "openai/gpt-4.1", "Judge.", tools=tools)
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"at": "it"}
        seen = {"role": "tool", "tool_call_id": call["id"], "content": "It is fine."}
        assert said(rollout, "openai/gpt-4.1", "Judge.", message, seen, tools=tools) == "I heard It is fine."
        trajectory = rollout.finish(reward=1.0)
    assert trajectory.result.metrics["turns"] == 1
    assert trajectory.result.metrics["model.openai/gpt-4.1.turns"] == 2
    keys, bodies = zip(*ChatServer.asked, strict=True)
    assert set(keys) == {f"Bearer {SECRET}"}
    assert {body["model"] for body in bodies} == {"big-critic"}
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "Judge."},
        {"role": "assistant", "content": "", "tool_calls": [{**bodies[1]["messages"][1]["tool_calls"][0]}]},
        {"role": "tool", "content": "It is fine.", "tool_call_id": "call_0"},
    ]


def test_a_question_that_an_endpoint_refuses_is_the_programs_own_and_nothing_is_lost(client: RolloutClient) -> None:
    with client.endpoint(job()) as rollout:
        status, answer = ask(rollout, "openai/gpt-4.1", "Please refuse.")
        assert status == 400
        assert "the model critic at http" in answer["error"]["message"]
        assert SECRET not in str(answer)
        assert said(rollout, "policy", "Help the user.") == "I am the policy"
        assert rollout.finish(reward=1.0).outcome == "completed"


def test_a_job_that_names_a_model_nobody_serves_is_refused_with_those_there_are(client: RolloutClient) -> None:
    with pytest.raises(InvalidJob, match=r"'simm' \(models.user\); the service has critic, policy, sim") as caught:
        client.submit(job(models={"user": "simm"}))
    assert caught.value.field == "models.user"
    assert client.status().queued.get("init", 0) == 0


def test_a_restarted_backend_broker_leaves_a_job_both_of_its_backends(
    service: LocalService, client: RolloutClient
) -> None:
    with client.endpoint(job()) as rollout:
        said(rollout, "policy", "Help the user.")
        said(rollout, "user", "You are a user.")
        service.brokers.stop("backend")
        service.brokers.start_backend_broker()
        both = {"local": 1, "local-sim": 1}
        until(lambda: in_flight(client) == both, "the broker learns of both assignments", WAIT_S)
        assert said(rollout, "user", "You are the last.").startswith("I simulate")
        rollout.finish(reward=1.0)
    until(lambda: not any(in_flight(client).values()), "both are released")


def test_cancelling_a_job_releases_both_backends(client: RolloutClient) -> None:
    with client.endpoint(job()) as rollout:
        said(rollout, "policy", "Help the user.")
        said(rollout, "user", "You are a user.")
        client.cancel([rollout.job_id])
        until(lambda: not any(in_flight(client).values()), "both are released", WAIT_S)
