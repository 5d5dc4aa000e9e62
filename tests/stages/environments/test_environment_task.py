"""The task `environment`, from the job to the trajectory, with environments of the standard library."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq import Job, Outcome, Role, Sampling
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.testing import LocalService, say, tool_call
from prorl_zmq.testing.scripted_engine import tokens_of
from prorl_zmq.wire.messages.base import NOTES_LIMIT
from prorl_zmq.wire.messages.jobs import EpisodeLimits

sys.path.append(str(Path(__file__).parent))
from offered import offer

if TYPE_CHECKING:
    from prorl_zmq import Trajectory
    from prorl_zmq.stages.handler import Failure
    from prorl_zmq.testing import ScriptedEngine

WORLDS = Path(__file__).with_name("strange_worlds.py")


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRORL_ENVIRONMENTS", str(tmp_path))
    for name in ("Both", "Guess", "Duel", "Strange", "Caller", "Players"):
        offer(tmp_path, name.lower(), f"{WORLDS}:{name}")
    return tmp_path


class Untried(EnvironmentHandler):
    """Ends a job at its first failure, with the trajectory that a retry would replace."""

    task = "untried"

    def run_exception(self, job: Job, error: Exception) -> Failure:
        return replace(super().run_exception(job, error), retry=False)


def played(engine: ScriptedEngine, instance: dict[str, Any], jobs: int = 1, **fields: Any) -> list[Trajectory]:
    handlers = {"environment": EnvironmentHandler, "untried": Untried}
    with (
        LocalService(handlers=handlers, engine=engine) as service,
        service.client() as client,
    ):
        for _ in range(jobs):
            client.submit(Job(**{"task": "environment", "instance": instance} | fields))
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
def test_a_player_of_the_instance_that_never_acts_is_noted() -> None:
    instance = {"environment": "guess", "args": {"up_to": 1}, "players": {"mian": {"trained": False}}}
    (trajectory,) = played(say("1"), instance)
    assert trajectory.result.notes["players of the instance"] == "mian never acted; those that did: main"


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
def test_a_failed_turn_cancels_the_other_players_turn_and_keeps_both_conversations() -> None:
    def turn(prompt: str) -> str:
        if "Again." not in prompt:
            return "move"
        return tool_call("ring") if "You are black." in prompt else "long " * 100_000

    engine = say(turn)
    long = {"sampling": Sampling(max_tokens=500_000), "episode": EpisodeLimits(max_tokens=800_000)}
    (trajectory,) = played(engine, {"environment": "both"}, task="untried", **long)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_ERROR, None)
    assert "the bell is broken" in str(trajectory.error)
    assert [(one.name, one.segments, one.stop_reason) for one in trajectory.result.conversations] == [
        ("white", 1, ""),
        ("black", 1, ""),
    ]
    assert roles(trajectory) == [Role.SYSTEM, *2 * [Role.USER, Role.ASSISTANT]] * 2
    said = [
        int(trajectory.loss_mask[start:end].sum()) for start, end, role in trajectory.turns if role == Role.ASSISTANT
    ]
    move = len(tokens_of("move"))
    assert said == [move, 0, move, len(tokens_of(tool_call("ring")))], "white's second turn was cancelled"
    assert trajectory.result.metrics["turns"] == 4


@pytest.mark.usefixtures("environments")
def test_rollouts_of_a_dead_worker_are_tried_again_and_none_is_rewarded() -> None:
    (trajectory,) = played(say("a"), {"environment": "strange", "args": {"does": ".dies"}})
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_ERROR, None)
    assert trajectory.error is not None
    assert trajectory.error.code == "environment_failed"
    assert "the environment strange: its worker ended with exit code 7" in trajectory.error.message
    assert trajectory.result.attempt == 3


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (".is_silent", "it has not ended, and no player sees anything to answer"),
        (".rewards_a_stranger", "all its rewards are for player_0, and its players are main"),
    ],
)
@pytest.mark.usefixtures("environments")
def test_what_would_be_a_reward_by_mistake_is_none(does: str, said: str) -> None:
    (trajectory,) = played(say("a"), {"environment": "strange", "args": {"does": does}})
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_ERROR, None)
    assert f"the environment strange: {said}" in str(trajectory.error)


@pytest.mark.usefixtures("environments")
def test_no_environment_says_more_than_a_result_can_have() -> None:
    (trajectory,) = played(say(*"a" * 10), {"environment": "strange", "args": {"does": ".says_a_lot"}})
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 5.0, None)
    notes = trajectory.result.notes
    assert len(notes) == NOTES_LIMIT
    assert notes["text 100"] == "t"
    assert "text 129: t" in notes["more info"]


@pytest.mark.usefixtures("environments")
def test_a_tool_that_the_environment_lacks_is_named() -> None:
    (trajectory,) = played(say("a"), {"environment": "duel", "tools": ["look", "lok"]})
    assert trajectory.outcome == Outcome.FAILED
    assert "the environment duel has no tool lok; it has look" in str(trajectory.error)


def test_an_environment_that_is_not_there_is_named(environments: Path) -> None:
    shutil.rmtree(environments / "guess")
    (trajectory,) = played(say("a"), {"environment": "guess"})
    assert trajectory.outcome == Outcome.INFRASTRUCTURE_ERROR
    assert trajectory.error is not None
    assert "environment guess is neither known nor installed" in trajectory.error.message


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
def test_players_of_a_program_are_conversations_with_rewards_of_their_own() -> None:
    (trajectory,) = played(say(*"abcd"), {"environment": "players"}, group_id="g")
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, None)
    white, black = trajectory.split()
    assert [(one.group_id, one.reward) for one in (white, black)] == [("g/white", 1.0), ("g/black", -1.0)]
    for part, letters in ((white, "ac"), (black, "bd")):
        said = part.token_ids[part.loss_mask]
        assert said.tolist() == [token for letter in letters for token in tokens_of(letter)]
        assert roles(part) == [Role.USER, Role.ASSISTANT] * 2
        assert len(part.segments()) == 1


@pytest.mark.usefixtures("environments")
def test_a_reward_of_a_player_who_never_spoke_is_refused_by_name() -> None:
    instance = {"environment": "players", "args": {"rewards": {"white": 1.0, "grey": 1.0}}}
    (trajectory,) = played(say(*"abcd"), instance)
    assert trajectory.outcome == Outcome.FAILED
    assert trajectory.error is not None
    assert "a reward for the conversation 'grey'; the rollout has: white, black" in trajectory.error.message


@pytest.mark.usefixtures("environments")
def test_a_programs_rewards_may_be_in_any_order() -> None:
    (trajectory,) = played(say("one", "two"), {"environment": "caller", "args": {"rewards": [1, 0]}})
    assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, None)
    assert [reward for _, reward in trajectory.result.turn_rewards] == [-2.5, -2.5]
    (trajectory,) = played(say("one", "two"), {"environment": "caller", "args": {"rewards": [0, "0"]}})
    assert trajectory.outcome == Outcome.FAILED
    assert "gave a turn two rewards" in str(trajectory.error)


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
    assert "ended without a model call that could be answered: it made none" in trajectory.error.message
