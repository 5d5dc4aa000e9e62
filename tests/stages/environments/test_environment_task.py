"""The task `environment`, from the job to the trajectory, with environments of the standard library."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq import Job, Outcome, Role
from prorl_zmq.stages.environments.environment_store import EnvironmentStore
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.testing import LocalService, say, tool_call
from prorl_zmq.wire.messages.jobs import EpisodeLimits

sys.path.append(str(Path(__file__).parent))
from offered import offer

if TYPE_CHECKING:
    from prorl_zmq import Trajectory
    from prorl_zmq.testing import ScriptedEngine

WORLDS = Path(__file__).with_name("strange_worlds.py")


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRORL_ENVIRONMENTS", str(tmp_path))
    for name in ("Guess", "Duel", "Strange", "Caller"):
        offer(tmp_path, name.lower(), f"{WORLDS}:{name}")
    return tmp_path


def played(engine: ScriptedEngine, instance: dict[str, Any], jobs: int = 1, **fields: Any) -> list[Trajectory]:
    with (
        LocalService(handlers={"environment": EnvironmentHandler}, engine=engine) as service,
        service.client() as client,
    ):
        for _ in range(jobs):
            client.submit(Job(task="environment", instance=instance, **fields))
        return list(client.stream())


def roles(trajectory: Trajectory) -> list[Role]:
    return [Role(role) for role in trajectory.turns[:, 2]]


@pytest.mark.usefixtures("environments")
def test_a_game_of_one_player_is_played_to_its_end() -> None:
    instance = {"environment": "guess", "args": {"up_to": 1}, "seed": 3, "system": "Guess."}
    (trajectory,) = played(say("7", "1"), instance)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, None)
    assert trajectory.result.stop_reason == "environment"
    assert trajectory.result.turn_rewards == ((4, 1.0),)
    assert roles(trajectory) == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert trajectory.result.metrics["number"] == 1.0


@pytest.mark.usefixtures("environments")
def test_a_limit_ends_the_game_with_the_rewards_so_far() -> None:
    (trajectory,) = played(say("77", "88", "99"), {"environment": "guess"}, episode=EpisodeLimits(max_turns=2))
    assert (trajectory.outcome, trajectory.reward, trajectory.result.stop_reason) == ("completed", 0.0, "max_turns")


@pytest.mark.usefixtures("environments")
def test_two_players_take_turns_and_may_call_the_environments_tools() -> None:
    def turn(prompt: str) -> str:
        if "look" in prompt and "nothing" not in prompt and "Begin." in prompt:
            return tool_call("look")
        return "move"

    (trajectory,) = played(say(turn), {"environment": "duel"}, group_id="g")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    white, black = trajectory.split()
    assert [(one.group_id.rpartition("/")[2], one.reward) for one in (white, black)] == [
        ("white", 1.0),
        ("black", -1.0),
    ]
    assert trajectory.result.metrics["tool_calls"] == 1
    assert trajectory.result.metrics["length"] == 4.0
    assert trajectory.result.notes["end"] == "mate"
    assert roles(trajectory).count(Role.ASSISTANT) == 5


@pytest.mark.usefixtures("environments")
def test_rollouts_of_a_dead_worker_are_tried_again_and_none_is_rewarded() -> None:
    (trajectory,) = played(say("a"), {"environment": "strange", "args": {"does": ".dies"}})
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_ERROR, None)
    assert trajectory.error is not None
    assert trajectory.error.code == "environment_failed"
    assert "the environment strange: its worker ended with exit code 7" in trajectory.error.message
    assert trajectory.result.attempt == 3


def test_a_rollout_plays_what_was_installed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_ENVIRONMENTS", str(tmp_path / "environments"))
    store = EnvironmentStore(tmp_path / "environments")
    rewards = []
    with (
        LocalService(handlers={"environment": EnvironmentHandler}, engine=say("toss")) as service,
        service.client() as client,
    ):
        for reward in (1.0, 2.0):
            world = "class Coin:\n    def reset(self, seed=None):\n        return 'Toss.', {}\n"
            world += f"    def step(self, action):\n        return '', {reward}, True, False, {{}}\n"
            (tmp_path / "coin.py").write_text(world)
            store.install("coin", say=str, heard=str, adapter=f"{tmp_path}/coin.py:Coin")
            client.submit(Job(task="environment", instance={"environment": "coin"}))
            rewards += [one.reward for one in client.stream()]
    assert rewards == [1.0, 2.0]


def test_an_environment_that_is_not_there_is_named(environments: Path) -> None:
    shutil.rmtree(environments / "guess")
    (trajectory,) = played(say("a"), {"environment": "guess"})
    assert trajectory.outcome == Outcome.INFRASTRUCTURE_ERROR
    assert trajectory.error is not None
    assert "environment guess own is not installed" in trajectory.error.message


@pytest.mark.usefixtures("environments")
def test_programs_call_the_model_at_an_address_of_their_own() -> None:
    """Equal rollouts at once keep all their turns, as they would not behind one address."""
    instance = {"environment": "caller", "args": {"rewards": [1]}, "seed": 1}
    trajectories = played(say("one", "two"), instance, jobs=4)
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, -2.5, None)
        assert roles(trajectory).count(Role.ASSISTANT) == 2
        assert trajectory.result.turn_rewards == ((len(trajectory.turns) - 1, -2.5),)
        assert trajectory.result.metrics["said"] == 6.0


@pytest.mark.usefixtures("environments")
def test_a_reward_of_a_turn_that_there_is_not_is_refused() -> None:
    (trajectory,) = played(say("one", "two"), {"environment": "caller", "args": {"rewards": [2]}})
    assert trajectory.outcome == Outcome.FAILED
    assert trajectory.error is not None
    assert "gave turn 2 the reward -2.5; the rollout has 2 turns" in trajectory.error.message


@pytest.mark.usefixtures("environments")
def test_a_program_that_calls_no_model_is_refused() -> None:
    (trajectory,) = played(say("one"), {"environment": "caller", "args": {"silent": True}})
    assert trajectory.outcome == Outcome.FAILED
    assert trajectory.error is not None
    assert "ended without a call of the model" in trajectory.error.message
