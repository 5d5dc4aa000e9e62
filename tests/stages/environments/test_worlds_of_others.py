"""NeMo Gym, OpenEnv and tau2 through the whole service, from a row or an instance to the trajectory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gym_server import GymServer
from openenv_server import GUESS, OpenEnvServer
from support.loops import serving

from prorl_zmq import Job, Outcome, Role
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.tasks.loading import load_jobs
from prorl_zmq.testing import LocalService, say, tool_call

sys.path.append(str(Path(__file__).parent))
from offered import offer

if TYPE_CHECKING:
    import pytest

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


def test_a_simulated_user_is_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_ENVIRONMENTS", str(tmp_path))
    offer(tmp_path, "tau2", f"{Path(__file__).with_name('tau2_world.py')}:Tau2")

    def turn(prompt: str) -> str:
        if "<scenario>" in prompt:
            return "Thanks. ###STOP###" if "Done." in prompt else "Create the task, please."
        return "Done." if "user_1" in prompt else tool_call("create_task", user_id="user_1", title="Important Meeting")

    args = {"domain": "mock", "task": "create_task_1"}
    instance = {"environment": "tau2", "args": args, "players": {"user": {"trained": False}}}
    (trajectory,) = played(say(turn), Job(task="environment", instance=instance))
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, None)
    assert trajectory.result.notes["ended"] == "user_stop"
    assert [Role(role) for role in trajectory.turns[:, 2]] == [
        Role.SYSTEM,
        Role.ASSISTANT,
        Role.USER,
        Role.ASSISTANT,
        Role.TOOL,
        Role.ASSISTANT,
    ]
    trained = trajectory.turns[trajectory.turns[:, 2] == Role.ASSISTANT]
    assert [bool(trajectory.loss_mask[start:end].any()) for start, end, _ in trained] == [False, True, True]
