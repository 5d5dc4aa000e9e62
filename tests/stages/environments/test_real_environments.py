"""GEM, TextArena and reasoning-gym as they are, each in its own virtual environment (see `make environments`)."""

from __future__ import annotations

import asyncio
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from documents import REAL_ENVIRONMENT_COMMANDS
from needed import lacking
from support.commands import prorl

from prorl_zmq import Job, Outcome, Role
from prorl_zmq.errors import EnvironmentFailed
from prorl_zmq.stages.environments.environment_pool import EnvironmentPool
from prorl_zmq.stages.environments.environment_store import EnvironmentStore
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.testing import LocalService, say

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_zmq import Trajectory
    from prorl_zmq.stages.environments.environment_template import EnvironmentPlace
    from prorl_zmq.testing import ScriptedEngine

pytestmark = pytest.mark.proof
MADE = Path(__file__).resolve().parents[3] / ".environments"
ROOT = MADE if MADE.is_dir() and "PRORL_ENVIRONMENTS" not in os.environ else EnvironmentStore.default_root()
SAID = ("you guessed 5", "Player 1 placed their symbol (X) in cell 0", "rewards: {'main': 1.0}; done")
TIC_TAC_TOE = {"environment": "textarena", "args": {"id": "TicTacToe-v0", "players": 2}, "seed": 1}


def installed(name: str, what: str = "environments") -> EnvironmentPlace:
    try:
        return EnvironmentStore(ROOT).place(name)
    except EnvironmentFailed as error:
        lacking(what, error.message)


def played(engine: ScriptedEngine, *instances: dict[str, Any]) -> list[Trajectory]:
    installed(instances[0]["environment"])
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalService(handlers={"environment": EnvironmentHandler}, engine=engine) as service,
        service.client() as client,
    ):
        patch.setenv("PRORL_ENVIRONMENTS", str(ROOT))
        for instance in instances:
            client.submit(Job(task="environment", instance=instance))
        return list(client.stream())


def pooled(use: Callable[[EnvironmentPool], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        pool = EnvironmentPool(1)
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_gem_gives_a_reward_for_each_turn() -> None:
    instance = {"environment": "gem", "args": {"id": "game:GuessTheNumber-v0-easy"}, "seed": 1}
    (trajectory,) = played(say(r"\boxed{5}", r"\boxed{4}", "no number"), instance)
    assert (trajectory.outcome, trajectory.result.stop_reason) == (Outcome.COMPLETED, "environment")
    assert trajectory.result.turn_rewards == ((5, -0.1),)  # that names no number; the other two earn 0
    assert trajectory.reward == -0.1
    assert [Role(role) for role in trajectory.turns[:, 2]] == [Role.USER, Role.ASSISTANT] * 3


def test_reasoning_gym_judges_an_answer() -> None:
    instance = {"environment": "reasoning-gym", "args": {"name": "basic_arithmetic"}, "seed": 1}
    (right, wrong) = sorted(
        played(
            say(lambda prompt: "<answer>-4</answer>" if "5 - 3 - 6" in prompt else "5"),
            instance,
            {**instance, "seed": 2},
        ),
        key=lambda one: -(one.reward or 0.0),
    )
    assert (right.reward, wrong.outcome) == (1.0, Outcome.COMPLETED)
    assert (wrong.reward or 0.0) < 1.0


def test_two_players_of_a_text_arena_game_have_conversations_of_their_own() -> None:
    def move(prompt: str) -> str:
        """Player 0 takes the middle column, player 1 squares beside it."""
        moves = ("[4]", "[1]", "[7]") if "You are Player 0" in prompt else ("[0]", "[2]")
        return moves[prompt.count("<|im_start|>assistant") - 1]

    (trajectory,) = played(say(move), TIC_TAC_TOE)
    assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, None)
    assert [one.reward for one in trajectory.split()] == [1.0, -1.0]
    assert [Role(role) for role in trajectory.turns[:, 2]].count(Role.ASSISTANT) == 5
    assert trajectory.result.metrics["turn_count of player 0"] == 3


def test_games_that_seed_the_global_generator_are_as_they_are_alone() -> None:
    """Wordle-like worlds draw from `random`; games at once in one process would disturb each other."""
    place = installed("textarena")

    async def play(pool: EnvironmentPool, seed: int) -> list[str]:
        async with pool.rollout(place, f"seed {seed}") as world:
            opening = await world.open({"id": "KuhnPoker-v0", "players": 2}, seed)
            seen, acting = [str(opening.observations)], next(iter(opening.observations))
            for _ in range(6):
                step = await world.step(acting, "[check]")
                seen.append(f"{step.observations} {step.rewards}")
                if step.done:
                    break
                acting = next(iter(step.observations))
            await world.close()
            return seen

    async def use(pool: EnvironmentPool) -> None:
        alone = [await play(pool, seed) for seed in range(4)]
        assert len({str(one) for one in alone}) > 1
        assert await asyncio.gather(*(play(pool, seed) for seed in range(4))) == alone

    pooled(use)


@pytest.mark.parametrize(("line", "said"), tuple(zip(REAL_ENVIRONMENT_COMMANDS, SAID, strict=True)))
def test_a_command_of_the_documents(line: str, said: str) -> None:
    program, *arguments = shlex.split(line)
    installed(arguments[2])
    done = prorl(*arguments, environment={**os.environ, "PRORL_ENVIRONMENTS": str(ROOT)})
    assert (program, done.returncode, done.stderr) == ("prorl", 0, f"prorl env: starting {arguments[2]}\n")
    assert said in done.stdout


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("gem", {"id": "game:Nothing-v0"}, "open raised ValueError: Environment game:Nothing-v0 not found"),
        ("textarena", {"id": "Nothing-v0"}, "open raised ValueError: Environment Nothing-v0 not found"),
        ("textarena", {}, "open raised KeyError: 'id'"),
        ("reasoning-gym", {"name": "nothing"}, "open raised ValueError: Dataset 'nothing' not registered"),
    ],
)
def test_what_an_environment_does_not_have_is_named(name: str, args: dict[str, Any], said: str) -> None:
    place = installed(name)

    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place, "a") as world:
            with pytest.raises(EnvironmentFailed, match=f"^the environment {name}: {said}"):
                await world.open(args, 1)

    pooled(use)
