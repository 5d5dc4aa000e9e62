"""NeMo Gym's own servers, and both kinds of verifiers as they are (`make trainers` and `make environments`)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from gym_python import gym_python
from support.loops import on_a_loop
from support.ports import free_port
from support.waiting import until

from prorl_zmq import Job, Outcome, Role
from prorl_zmq.stages.environments.adapters.nemo_gym import NemoGym
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.stages.package_store import RECORD, Installation
from prorl_zmq.testing import LocalService, say

sys.path.append(str(Path(__file__).parent))
from test_real_environments import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Trajectory
    from prorl_zmq.testing import ScriptedEngine

pytestmark = [pytest.mark.proof, pytest.mark.timeout(400)]
TESTS = Path(__file__).parents[2]
WORLDS = Path(__file__).with_name("verifiers_worlds.py")
START_S = 180.0
"""Longest import of NeMo Gym on a busy machine."""


@contextmanager
def gym_server(module: str, name: str) -> Iterator[str]:
    port = free_port()
    argv = (str(gym_python()), str(TESTS / "gym_worlds.py"), f"resources_servers.{module}.app", name, str(port))
    with subprocess.Popen(argv) as process:
        try:
            until(lambda: process.poll() is not None or listens(port), f"the server {name}", START_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def listens(port: int) -> bool:
    with ExitStack() as opened:
        try:
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        except OSError:
            return False
    return True


def example(module: str) -> dict[str, Any]:
    """Return the first row of the package's example."""
    (place,) = (gym_python().parent.parent / "lib").glob(f"python*/site-packages/resources_servers/{module}/data")
    row: dict[str, Any] = json.loads((place / "example.jsonl").read_text().splitlines()[0])
    return row


def test_a_counter_of_nemo_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    row = example("example_session_state_mgmt")

    @on_a_loop
    async def play() -> None:
        for added, reward in ((row["expected_count"] - row["initial_count"], 1.0), (0, 0.0)):
            world = NemoGym()
            tools = (await world.open({"row": row}, None))["tools"]
            assert {tool["name"] for tool in tools} == {"increment_counter", "get_counter_value"}
            await world.call("main", "increment_counter", {"count": added})
            wrong = await world.call("main", "increment_counter", {"count": "x"})
            assert "int_parsing" in wrong["observations"]["main"]
            assert await world.step("main", "Done.") == {"done": True}
            assert (await world.close())["rewards"] == {"main": reward}

    with gym_server("example_session_state_mgmt", "StatefulCounterResourcesServer") as url:
        monkeypatch.setenv("PRORL_NEMO_GYM", f"counter={url}")
        play()


def test_a_game_of_nemo_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_a_loop
    async def play() -> None:
        world = NemoGym()
        opened = await world.open({"row": example("blackjack")}, None)
        assert "Your hand:" in opened["observations"]["main"][-1]["content"]
        stepped = await world.step("main", "<action>stand</action>")
        assert stepped["done"]
        assert stepped["rewards"]["main"] in {-1.0, 0.0, 1.0}
        assert stepped["info"]["result"] in {"loss", "draw", "win"}
        assert await world.close() is None

    with gym_server("blackjack", "BlackjackEnv") as url:
        monkeypatch.setenv("PRORL_NEMO_GYM", f"blackjack={url}")
        play()


def played(root: Path, name: str, adapter: str, engine: ScriptedEngine, *args: dict[str, Any]) -> list[Trajectory]:
    """Play on the interpreter of an installed environment, with an adapter that finds the packages of this folder."""
    folder = root / "worlds" / "own"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {installed(name, "verifiers").python} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    record = Installation("worlds", "own", str(folder), "", "", 0.0, 1.0, 1, f"{WORLDS}:{adapter}")
    (folder / RECORD).write_bytes(msgspec.json.encode(record))
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalService(handlers={"environment": EnvironmentHandler}, engine=engine) as service,
        service.client() as client,
    ):
        patch.setenv("PRORL_ENVIRONMENTS", str(root))
        for one in args:
            client.submit(Job(task="environment", instance={"environment": "worlds", "args": one}, max_attempts=1))
        return list(client.stream())


def test_a_taskset_of_verifiers_runs_on_its_own_server(tmp_path: Path) -> None:
    seat = {"harness": {"id": "null"}, "max_turns": 4}
    args = [{"taskset": "echo_taskset", "task": number, "env": {"agent": seat}} for number in (0, 1)]
    answer = say(lambda prompt: "It is red.")
    made = played(tmp_path, "verifiers", "Verifiers", answer, *args, {**args[0], "task": 7})
    right, wrong, unknown = sorted(made, key=lambda one: -1.0 if one.reward is None else one.reward, reverse=True)
    assert (right.outcome, right.reward, right.error) == (Outcome.COMPLETED, 2.0, None)
    assert right.result.metrics["words"] == 3.0
    assert [Role(role) for role in right.turns[:, 2]][-2:] == [Role.USER, Role.ASSISTANT]
    assert right.loss_mask.any()
    assert (wrong.outcome, wrong.reward) == (Outcome.COMPLETED, 0.0)
    assert "the taskset echo_taskset has no task 7" in unknown.error.message


def test_an_environment_of_verifiers_0_1(tmp_path: Path) -> None:
    args = {"id": "echo_environment", "task": 0}
    blue, group = {**args, "args": {"word": "blue"}}, {**args, "args": {"group": True}}
    answer = say(lambda prompt: "It is red.")
    made = played(tmp_path, "verifiers-v0", "VerifiersV0", answer, args, blue, group)
    right, wrong, refused = sorted(made, key=lambda one: -9.0 if one.reward is None else one.reward, reverse=True)
    assert (right.outcome, right.reward, right.error) == (Outcome.COMPLETED, 1.0, None)
    assert [Role(role) for role in right.turns[:, 2]].count(Role.ASSISTANT) == 2
    assert right.result.segments == ()  # one
    assert (wrong.outcome, wrong.reward) == (Outcome.COMPLETED, -1.0)
    assert "judges all rollouts of a group together" in refused.error.message
