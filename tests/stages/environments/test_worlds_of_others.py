"""NeMo Gym, OpenEnv and tau2 through the whole service, from a row or an instance to the trajectory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gym_server import GymServer
from noted_engine import FamilyEngine, NotedEngine, check_exact
from openenv_server import GUESS, OpenEnvServer
from support.chat_server import ChatServer, chat_server
from support.loops import serving

from prorl_zmq import Job, Outcome, Role
from prorl_zmq.errors import InvalidJob
from prorl_zmq.inference.tokenizer import decode
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.tasks.loading import load_jobs
from prorl_zmq.testing import LocalService, say, tool_call

sys.path.append(str(Path(__file__).parent))
from offered import offer

if TYPE_CHECKING:
    from prorl_zmq import Trajectory
    from prorl_zmq.testing import ScriptedEngine

TOOL = {"type": "function", "name": "increment_counter", "description": "", "parameters": {"type": "object"}}
COUNTER = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add 3."}], "tools": [TOOL]},
    "initial_count": 3,
    "expected_count": 6,
}


def played(engine: ScriptedEngine, *jobs: Job) -> list[Trajectory]:
    with (
        LocalService(handlers={"environment": EnvironmentHandler}, engine=engine) as service,
        service.client() as client,
    ):
        for job in jobs:
            client.submit(job)
        return list(client.stream())


def test_rows_of_nemo_gym_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**COUNTER, "expected_count": 7}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (COUNTER, other)))
    server = GymServer()
    with serving(server):
        monkeypatch.setenv("PRORL_NEMO_GYM", f"counter={server.url}")
        jobs = load_jobs(tmp_path / "rows.jsonl")
        turns = say(lambda prompt: "It is 6." if "success" in prompt else tool_call("increment_counter", count=3))
        right, wrong = sorted(played(turns, *jobs), key=lambda one: -(one.reward or 0))
    assert (right.outcome, right.reward, right.error) == (Outcome.COMPLETED, 1.0, None)
    assert right.result.metrics["tool_calls"] == 1
    roles = [Role(role) for role in right.turns[:, 2]]
    assert roles == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert (wrong.outcome, wrong.reward) == (Outcome.COMPLETED, 0.0)
    assert len({session for _, session, _ in server.requests}) == 2


def test_a_masked_rollout_is_tried_again_and_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    server = GymServer()
    server.verdict = {"mask_sample": True, "failure_reason": "the judge is away"}
    with serving(server):
        monkeypatch.setenv("PRORL_NEMO_GYM", f"counter={server.url}")
        job = Job(task="environment", instance={"environment": "nemo-gym", "args": {"row": COUNTER}}, max_attempts=2)
        (trajectory,) = played(say("It is 3."), job)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_ERROR, None)
    assert "the judge is away" in trajectory.error.message
    assert [path for path, _, _ in server.requests].count("/verify") == 2


def test_an_openenv_environment_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OpenEnvServer(GUESS)
    with serving(server):
        monkeypatch.setenv("PRORL_OPENENV", f"guess={server.url}")
        instance = {"environment": "openenv", "args": {"show": "text"}, "seed": 4}
        (trajectory,) = played(say("5", "7"), Job(task="environment", instance=instance))
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 0.5, None)
    assert trajectory.result.stop_reason == "environment"
    assert server.resets == [{"seed": 4}]


def test_a_server_without_a_name_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_OPENENV", "guess=http://127.0.0.1:9")
    instance = {"environment": "openenv", "args": {"server": "shop"}}
    (trajectory,) = played(say("5"), Job(task="environment", instance=instance, max_attempts=1))
    assert trajectory.outcome == Outcome.INFRASTRUCTURE_ERROR
    assert "no server 'shop': PRORL_OPENENV in the environment of the RUN processes names guess" in (
        trajectory.error.message
    )


TAU2 = {
    "environment": "tau2",
    "args": {"domain": "mock", "task": "create_task_1"},
    "players": {"user": {"model": "user", "trained": False}},
}
TAU2_TURNS = [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
"""Of the agent; tau2's greeting is part of the user's turn, since a template renders what it begins with at once."""


@pytest.fixture
def tau2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_ENVIRONMENTS", str(tmp_path / "environments"))
    offer(tmp_path / "environments", "tau2", f"{Path(__file__).with_name('tau2_world.py')}:Tau2")


def agent(prompt: str) -> str:
    """The policy: it creates what the user wants, and thinks before each turn."""
    create = tool_call("create_task", user_id="user_1", title="Important Meeting")
    return "<think>\nA secret plan.\n</think>\n\n" + ("Done." if '"user_1"' in prompt else create)


def user(prompt: str) -> str:
    return "Thanks. ###STOP###" if "Done." in prompt else "Create the task, please."


@pytest.mark.usefixtures("tau2")
def test_a_user_that_another_model_plays_is_context(tmp_path: Path) -> None:
    """Two engines with tokenizers of their own: the policy, which reasons, and another one named `user`."""
    policy, simulator = FamilyEngine("qwen3", agent, tmp_path), NotedEngine(user)
    with (
        LocalService(
            handlers={"environment": EnvironmentHandler}, engine=policy, models={"user": simulator}
        ) as service,
        service.client() as client,
    ):
        assert {one.backend.name: one.backend.frozen for one in client.backends.list()} == {
            "policy": False,
            "user": False,
        }
        client.submit(Job(task="environment", instance=TAU2))
        (trajectory,) = client.stream()
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, None)
    assert trajectory.result.notes["ended"] == "user_stop"
    assert trajectory.result.stop_reason == "environment"

    (part,) = trajectory.split()
    assert [Role(role) for role in part.turns[:, 2]] == TAU2_TURNS
    assert check_exact(part, policy.said) == len(policy.said) == 2
    assert part.result.metrics["turns"] == 2
    assert policy.decode(part.token_ids[part.loss_mask]).count("A secret plan.") == 2
    parts = {one.name: (one.trained, one.segments) for one in trajectory.result.conversations}
    assert parts == {"user": (False, 0), "agent": (True, 1)}

    heard = [decode(one.prompt) for one in simulator.said]
    assert len(heard) == 2
    assert "Done." in heard[1]
    assert not any(hidden in text for text in heard for hidden in ("secret", "think", "create_task"))
    assert "<scenario>" in heard[0]
    assert "<scenario>" not in policy.decode(trajectory.token_ids)
    assert "Create the task, please." in policy.decode(trajectory.token_ids)
    assert "Thanks. ###STOP###" in trajectory.result.notes["conversation user"]


@pytest.mark.usefixtures("tau2")
def test_a_user_whom_the_policy_plays_untrained_is_context() -> None:
    def turn(prompt: str) -> str:
        return user(prompt) if "<scenario>" in prompt else agent(prompt).partition("</think>")[2].strip()

    instance = {**TAU2, "players": {"user": {"trained": False}}}
    (trajectory,) = played(say(turn), Job(task="environment", instance=instance))
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, None)
    spoken = trajectory.turns[trajectory.turns[:, 2] == Role.ASSISTANT]
    assert [bool(trajectory.loss_mask[start:end].any()) for start, end, _ in spoken] == [False, True, True]


class User(ChatServer):
    def message(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": user(json.dumps(body["messages"]))}


@pytest.mark.usefixtures("tau2")
def test_a_user_behind_an_openai_style_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = FamilyEngine("qwen3", agent, tmp_path)
    with chat_server(User) as url:
        monkeypatch.setenv("PRORL_MODEL_SIM_URL", url)
        monkeypatch.setenv("PRORL_MODEL_SIM_MODEL", "big-user")
        (trajectory,) = played(policy, Job(task="environment", instance=TAU2, models={"user": "sim"}))
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, None)
    (part,) = trajectory.split()
    assert [Role(role) for role in part.turns[:, 2]] == TAU2_TURNS
    assert check_exact(part, policy.said) == len(policy.said) == 2
    bodies = [body for _, body in User.asked]
    assert [[message["role"] for message in body["messages"]] for body in bodies] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert {body["model"] for body in bodies} == {"big-user"}
    assert bodies[1]["messages"][-1]["content"].strip() == "Done."
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["check_notifications"]
    assert "secret" not in json.dumps(bodies)


@pytest.mark.usefixtures("tau2")
def test_a_user_that_nobody_plays_is_named() -> None:
    with pytest.raises(InvalidJob, match=r"serves the model 'user' \(players\.user\.model\)"):
        played(say("Hello."), Job(task="environment", instance=TAU2))
