"""Environments on OpenEnv's own server, as they are (`make openenv`)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from framework_python import framework_python
from support.loops import on_a_loop
from support.ports import free_port
from support.waiting import until

from prorl_zmq import Job, Outcome, Role
from prorl_zmq.stages.environments.adapters import openenv
from prorl_zmq.stages.environments.adapters.openenv import VARIABLE, OpenEnv
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.testing import LocalService, say

sys.path.append(str(Path(__file__).parent))
from test_real_worlds import listens

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]
SERVER = Path(__file__).parents[2] / "openenv_worlds.py"
START_S = 120.0
"""Longest import of OpenEnv on a busy machine."""


@contextmanager
def named(name: str, sessions: int = 8) -> Iterator[None]:
    """Run a server of an environment, and name it to the adapter."""
    port = free_port()
    argv = (framework_python("openenv"), str(SERVER), name, str(port), str(sessions))
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(argv) as process:
        try:
            until(lambda: process.poll() is not None or listens(port), f"the server {name}", START_S)
            patch.setenv(VARIABLE, f"{name}=http://127.0.0.1:{port}")
            yield
        finally:
            process.kill()


def test_a_game_through_the_whole_service() -> None:
    instance = {"environment": "openenv", "args": {"show": "text", "reset": {"up_to": 7}}, "seed": 12}
    with (
        named("guess"),
        LocalService(handlers={"environment": EnvironmentHandler}, engine=say("3", "5")) as service,
        service.client() as client,
    ):
        for _ in range(4):
            client.submit(Job(task="environment", instance=instance))
        trajectories = list(client.stream())
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 0.5, None)
        assert [reward for _, reward in trajectory.result.turn_rewards] == [-0.5, 1.0]
        assert [Role(role) for role in trajectory.turns[:, 2]] == [Role.USER, Role.ASSISTANT] * 2


def test_sessions_errors_and_a_full_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "WAIT_S", 0.05)

    @on_a_loop
    async def play() -> None:
        first, second = OpenEnv(), OpenEnv()
        opened = await first.open({"reset": {"up_to": 5}}, 3)
        assert opened == {"observations": {"main": '{"text": "Guess a number below 5.", "tries": 0}'}, "tools": []}
        waiting = asyncio.create_task(second.open({}, 4))
        assert (await first.step("main", "2"))["rewards"] == {"main": -0.5}
        with pytest.raises(RuntimeError, match="the OpenEnv environment failed: EXECUTION_ERROR: the world broke"):
            await first.step("main", "crash")
        assert not waiting.done()
        await first.close()
        await waiting
        stepped = await second.step("main", "4")
        assert stepped["observations"] == {"main": '{"text": "Yes.", "tries": 1}'}
        assert (stepped["rewards"], stepped["done"]) == ({"main": 1.0}, True)
        await second.close()

    with named("guess", sessions=1):
        play()


def test_an_action_of_several_fields_is_a_function() -> None:
    @on_a_loop
    async def play() -> None:
        world = OpenEnv()
        (tool,) = (await world.open({"show": "text"}, None))["tools"]
        assert (tool["name"], tool["description"]) == ("act", "Move to a place.")
        assert tool["parameters"]["properties"].keys() == {"x", "y"}
        wrong = await world.call("main", "act", {"x": "east"})
        assert wrong["observations"]["main"].startswith("This is not a valid action: ")
        assert "x: Input should be a valid integer" in wrong["observations"]["main"]
        assert await world.call("main", "act", {"x": 2, "y": 1}) == {
            "observations": {"main": "You are at 2, 1."},
            "rewards": {"main": 1.0},
            "done": True,
        }
        await world.close()

    with named("move"):
        play()


def test_tools_of_the_environment() -> None:
    @on_a_loop
    async def play() -> None:
        world = OpenEnv()
        (tool,) = (await world.open({}, None))["tools"]
        assert (tool["name"], tool["description"]) == ("add", "Add two numbers.")
        assert tool["parameters"]["required"] == ["a", "b"]
        assert (await world.call("main", "add", {"a": 2, "b": 3}))["observations"] == {"main": "5"}
        wrong = await world.call("main", "add", {"a": 2})
        assert "b" in wrong["observations"]["main"]
        assert await world.step("main", "It is 5.") == {"done": True}
        await world.close()

    with named("sums"):
        play()
