"""Self-play of real TextArena games through `open_batch` into the learner of `prorl demo`."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import numpy as np
import pytest
from noted_engine import NotedEngine, check_exact

from prorl_zmq import Job
from prorl_zmq.demo.grpo import Grpo, Settings, advantages_of
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.policy import one_blas_thread
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.testing import LocalService

sys.path.append(str(Path(__file__).parent))
from test_real_environments import ROOT, installed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from prorl_zmq import Group, Sampling
    from prorl_zmq.inference.engine import Generation

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]
GROUPS, SIZE = 3, 4
BATCH_S = 120.0


class Player(NotedEngine):
    """Says moves, with the log-probs that the demo's base policy gives them."""

    def __init__(self, move: Callable[[str], str]) -> None:
        super().__init__(move)
        self._policy = base_policy()

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        made = await super().generate(token_ids, sampling, stop_token_ids, job_id)
        context = token_ids[-self._policy.shape.window :]
        with one_blas_thread():
            logprobs = self._policy.logprobs(np.concatenate([context, made.token_ids]))[len(context) :]
        self.said[-1] = self.said[-1]._replace(generation=replace(made, logprobs=logprobs))
        return self.said[-1].generation


def legal(choose: Callable[[int, list[str]], str]) -> Callable[[str], str]:
    """Return a player of board games that list the available moves; `choose` gets its number and these."""

    def move(prompt: str) -> str:
        (player,) = set(re.findall(r"You are Player (\d)", prompt))
        return choose(int(player), re.findall(r"\[\d+\]", prompt.rpartition("Available Moves:")[2]))

    return move


def collected(engine: Player, game: str, players: int) -> list[Group]:
    """Return the groups of a batch that keeps informative ones."""
    installed("textarena")
    args = {"id": game, "players": players}
    prompts = (Job(task="environment", instance={"environment": "textarena", "args": args, "seed": n}) for n in count())
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalService(handlers={"environment": EnvironmentHandler}, engine=engine) as service,
        service.client() as client,
    ):
        patch.setenv("PRORL_ENVIRONMENTS", str(ROOT))
        with client.open_batch(GROUPS, SIZE, keep="informative", carry="nothing") as batch:
            batch.feed(prompts)
            groups = []
            while (group := batch.next_group(BATCH_S)) is not None:
                groups.append(group)
    assert [len(group) for group in groups] == [SIZE] * GROUPS
    return groups


def test_both_players_of_a_zero_sum_game_are_learned_from_by_their_own_baselines() -> None:
    moves = random.Random(1)
    engine = Player(legal(lambda _, available: moves.choice(available)))
    groups = collected(engine, "TicTacToe-v0", 2)
    roles = {}
    for group in groups:
        for rollout in group.trajectories:
            parts = rollout.split()
            assert [part.group_id for part in parts] == [f"{rollout.group_id}/0", f"{rollout.group_id}/1"]
            assert sum(part.reward for part in parts) == 0.0
            turns = sum(check_exact(part, engine.said) for part in parts)
            assert turns == len([one for one in engine.said if one.job_id == rollout.job_id])
        for role in group.split():
            earned = [part.reward for part in role.trajectories]
            assert set(earned) <= {-1.0, 0.0, 1.0}
            assert len(set(earned)) > 1, "an informative group is one for each player"
            roles[role.group_id] = [(one - fmean(earned)) / pstdev(earned) for one in earned]
            np.testing.assert_allclose(advantages_of(role), roles[role.group_id], rtol=1e-6)
    assert len(roles) == 2 * GROUPS
    for white, black in zip([*roles.values()][::2], [*roles.values()][1::2], strict=True):
        np.testing.assert_allclose(white, np.negative(black))

    learner = Grpo(base_policy(), Settings(groups=GROUPS, group_size=SIZE, reference_pull=0.0))
    learned = [
        (part, advantage)
        for group in groups
        for role in group.split()
        for part, advantage in zip(role.trajectories, roles[role.group_id], strict=True)
    ]

    def gain() -> float:
        """How likely the policy is to say what it said, by the advantage of having said it."""
        policy = learner.policy
        return sum(advantage * float(policy.logprobs(one.token_ids)[one.loss_mask].sum()) for one, advantage in learned)

    before = gain()
    stats = learner.step(groups)
    assert stats.generated_tokens == sum(part.generated_tokens for part, _ in learned)
    assert stats.informative_groups == 2 * GROUPS
    assert stats.logprob_gap < 1e-4, "the learner sees the tokens that the engine said, behind the same contexts"
    assert (learner.weight_version, stats.staleness_max) == (1, 0)
    assert gain() > before


def test_a_group_is_kept_if_any_players_rewards_differ() -> None:
    """Player 0 always loses, and so the rollout's own reward is always -1; one of the other two wins."""
    plans = {0: ("[24]", "[12]", "[21]", "[16]"), 1: ("[0]", "[1]", "[2]", "[3]"), 2: ("[5]", "[6]", "[7]", "[8]")}
    blunders = random.Random(2)

    def choose(player: int, available: list[str]) -> str:
        planned = next(cell for cell in plans[player] if cell in available)
        return "[19]" if planned == "[3]" and blunders.random() < 0.5 else planned

    groups = collected(Player(legal(choose)), "ThreePlayerTicTacToe-v0", 3)
    for group in groups:
        assert group.rewards.tolist() == [-1.0] * SIZE
        loser, *others = group.split()
        assert not advantages_of(loser).any()
        won = [sorted(part.reward for part in both) for both in zip(*(one.trajectories for one in others), strict=True)]
        assert won == [[-1.0, 1.0]] * SIZE
        assert all(advantages_of(other).any() for other in others)
