from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from finished_groups import Talk, Turn, played

from prorl_zmq import Group
from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.demo.grpo import Grpo, Settings, advantages_of
from prorl_zmq.inference.policy import Policy, PolicyShape, draw
from prorl_zmq.wire.messages.jobs import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 12
SETTINGS = Settings(steps=20, groups=4, group_size=8, learning_rate=1e-2, reference_pull=0.05)


def small_policy() -> Policy:
    policy = Policy.initial(PolicyShape(VOCABULARY, window=4, embedding=8, hidden=32), 0)
    policy.parameters["output_weight"] += 0.1 * np.random.default_rng(0).standard_normal((32, VOCABULARY), np.float32)
    return policy


def roll_out(
    policy: Policy,
    prompt: int,
    name: str,
    reward: Callable[[int], float],
    random: np.random.Generator,
    version: int = 0,
    temperature: float = 1.0,
) -> Trajectory:
    """An episode of one turn of two tokens, of which the first decides the reward."""
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.USER)
    builder.add_context(np.array([1, 2, prompt], np.int32))
    builder.begin_turn(Role.ASSISTANT)
    generated = []
    for _ in range(2):
        context = policy.contexts(np.append(builder.prompt(), np.int32(0)))[-1:]
        token, logprob = draw(policy.logits(context), np.array([temperature]), random.random(1))
        builder.add_generated(token, logprob, np.array([version], np.int32))
        generated.append(int(token[0]))
    result = Result(
        job_id=name,
        task="bandit",
        outcome=Outcome.COMPLETED,
        reward=reward(generated[0]),
        tokens=builder.tokens,
        turns=builder.turns,
    )
    return Trajectory.from_frame(result, builder.block())


def batch(policy: Policy, reward: Callable[[int, int], float], step: int, version: int = 0) -> list[Group]:
    random = np.random.default_rng(step)
    return [
        Group(
            f"id-{number}",
            f"prompt-{number}",
            tuple(
                roll_out(
                    policy, 3 + number, f"{number}-{index}", lambda token, g=number: reward(g, token), random, version
                )  # type: ignore[misc]
                for index in range(SETTINGS.group_size)
            ),
        )
        for number in range(SETTINGS.groups)
    ]


def mean_reward(groups: list[Group]) -> float:
    return float(np.mean([group.rewards for group in groups]))


def changed(policy: Policy, before: Policy) -> bool:
    return any((value != before.parameters[name]).any() for name, value in policy.parameters.items())


def test_the_reward_rises_on_a_bandit_with_another_arm_for_each_prompt() -> None:
    policy = small_policy()
    grpo = Grpo(policy, SETTINGS)
    rewards = []
    for step in range(SETTINGS.steps):
        groups = batch(policy, lambda group, token: float(token % 4 == group), step, grpo.weight_version)
        rewards.append(mean_reward(groups))
        stats = grpo.step(groups)
        assert stats.logprob_gap < 1e-5
        assert stats.generated_tokens == 64
        assert stats.staleness_max == 0
        assert stats.entropy > 0
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.8
    assert grpo.weight_version == SETTINGS.steps


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_groups_whose_rewards_are_equal_carry_no_gradient(reward: float) -> None:
    policy = small_policy()
    before = policy.copy()
    stats = Grpo(policy, SETTINGS).step(batch(policy, lambda *_: reward, 0))
    assert not changed(policy, before)
    assert (stats.informative_groups, stats.gradient_norm) == (0, 0.0)


def test_advantages_are_in_standard_deviations_of_the_group() -> None:
    random = np.random.default_rng(0)

    def group(*rewards: float) -> Group:
        rollouts = (roll_out(small_policy(), 3, "a", lambda _, r=reward: r, random) for reward in rewards)  # type: ignore[misc]
        return Group("a", "a", tuple(rollouts))

    found = advantages_of(group(1.0, 0.0, 0.0, 0.0))
    np.testing.assert_allclose(found, (np.array([1, 0, 0, 0]) - 0.25) / np.sqrt(3 / 16), rtol=1e-6)
    assert not advantages_of(group(0.5, 0.5)).any()
    assert not advantages_of(group(1.0)).any()


def test_the_order_of_arrival_does_not_matter() -> None:
    policies = [small_policy(), small_policy()]
    groups = batch(policies[0], lambda _, token: float(token < 4), 0)
    for policy, order in zip(policies, (groups, groups[::-1]), strict=True):
        Grpo(policy, SETTINGS, seed=1).step(order)
    assert not changed(*policies)


def test_a_wrong_log_prob_shows_in_the_gap_and_older_weights_do_not() -> None:
    policy = small_policy()
    groups = batch(policy, lambda _, token: float(token < 4), 0)
    groups[1].trajectories[5].logprobs[-1] -= 0.5
    assert Grpo(policy.copy(), SETTINGS).step(groups).logprob_gap == pytest.approx(0.5, abs=1e-4)
    later = Grpo(policy.copy(), SETTINGS)
    later.weight_version = 1
    stats = later.step(groups)
    assert (stats.logprob_gap, stats.staleness_max) == (0.0, 1)


def test_a_learner_continues_from_its_state() -> None:
    first, second = (Grpo(small_policy(), SETTINGS, seed) for seed in (1, 2))
    groups = batch(first.policy, lambda _, token: float(token < 4), 0)
    first.step(groups)
    second.load_state({name: value.copy() for name, value in first.state().items()})
    assert second.weight_version == 1
    for grpo in (first, second):
        grpo.step(groups)
    assert not changed(first.policy, second.policy)
    with pytest.raises(KeyError):
        second.load_state({})


def test_the_temperature_is_part_of_the_distribution() -> None:
    policy = small_policy()
    random = np.random.default_rng(0)
    rollouts = (
        roll_out(policy, 3, f"a-{index}", lambda token: float(token < 4), random, temperature=0.5)
        for index in range(16)
    )
    groups = [Group("a", "a", tuple(rollouts))]
    warm = Settings(temperature=0.5)
    assert Grpo(policy.copy(), warm).step(groups).logprob_gap < 1e-5
    assert Grpo(policy.copy(), SETTINGS).step(groups).logprob_gap > 0.01


def test_a_token_that_moved_far_enough_is_left_alone() -> None:
    policy = small_policy()
    before = policy.copy()
    groups = batch(policy, lambda _, token: float(token < 4), 0)
    for trajectory in (
        one for group in groups for one in group.trajectories
    ):  # as if the policy had moved: up where it was right, down where it was wrong
        trajectory.logprobs[trajectory.loss_mask] += -2.0 if trajectory.reward else 2.0
    stats = Grpo(policy, Settings(reference_pull=0.0)).step(groups)
    assert stats.clipped == 1.0
    assert not changed(policy, before)


def test_the_reference_pulls_back() -> None:
    settings = Settings(reference_pull=1e4, learning_rate=3e-3)
    policy = small_policy()
    grpo = Grpo(policy, settings)
    groups = batch(policy, lambda _, token: float(token < 4), 0)
    (first, *_) = groups[0].trajectories
    token_ids, generated = first.token_ids, first.loss_mask
    start = policy.logprobs(token_ids)[generated]
    policy.parameters["output_bias"] += np.linspace(-1, 1, VOCABULARY, dtype=np.float32)
    moved = np.abs(policy.logprobs(token_ids)[generated] - start).max()
    for _ in range(20):
        grpo.step(groups)
    assert np.abs(policy.logprobs(token_ids)[generated] - start).max() < moved / 2


def test_both_players_of_a_zero_sum_game_learn() -> None:
    """Each by its own baseline: white's winning answer becomes likelier, and black's losing one less likely."""
    policy = Policy.initial(PolicyShape(VOCABULARY, window=4, embedding=8, hidden=32), 0)
    learner = Grpo(policy, SETTINGS)
    even = -float(np.log(VOCABULARY))

    def game(white: int, won: float) -> Trajectory:
        said = [[Turn(Role.USER, [1, prompt]), Turn(Role.ASSISTANT, [], [(answer, even, 0)])]
                for prompt, answer in ((3, white), (4, 14 - white))]  # fmt: skip
        return played([Talk("white", said[0], won), Talk("black", said[1], -won)], 0.0)

    def likelihood(prompt: int, answer: int) -> float:
        logits = policy.logits(policy.contexts(np.array([1, prompt, 0], np.int32))[-1:])[0]
        return float(np.exp(logits[answer] - np.log(np.exp(logits).sum())))

    before = {pair: likelihood(*pair) for pair in ((3, 6), (4, 8))}
    group = Group("g", "prompt", (game(6, 1.0), game(7, -1.0)))
    assert not advantages_of(group).any()
    assert learner.step([group]).informative_groups == 2
    assert likelihood(3, 6) > before[3, 6]
    assert likelihood(4, 8) < before[4, 8]
