from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from prorl_zmq.data.trajectory import Role, Trajectory, TrajectoryBuilder
from prorl_zmq.demo.grpo import Grpo, GrpoSettings, group_advantages
from prorl_zmq.inference.policy import Policy, PolicyShape, draw
from prorl_zmq.wire.messages.jobs import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 12
SETTINGS = GrpoSettings(steps=20, groups=4, group_size=8, learning_rate=1e-2, reference_pull=0.05)


def small_policy() -> Policy:
    policy = Policy.initial(PolicyShape(VOCABULARY, window=4, embedding=8, hidden=32), 0)
    policy.parameters["output_weight"] += 0.1 * np.random.default_rng(0).standard_normal((32, VOCABULARY), np.float32)
    return policy


def roll_out(
    policy: Policy,
    prompt: int,
    name: str,
    reward: Callable[[int], float | None],
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
    earned = reward(generated[0])
    result = Result(
        job_id=name,
        task="bandit",
        group_id=name.partition("-")[0],
        outcome=Outcome.INFRASTRUCTURE_ERROR if earned is None else Outcome.COMPLETED,
        reward=earned,
        tokens=builder.tokens,
        turns=builder.turns,
    )
    return Trajectory.from_frame(result, builder.block())


def batch(policy: Policy, reward: Callable[[int, int], float | None], step: int, version: int = 0) -> list[Trajectory]:
    random = np.random.default_rng(step)
    return [
        roll_out(policy, 3 + group, f"{group}-{index}", lambda token, g=group: reward(g, token), random, version)  # type: ignore[misc]
        for group in range(SETTINGS.groups)
        for index in range(SETTINGS.group_size)
    ]


def changed(policy: Policy, before: Policy) -> bool:
    return any((value != before.parameters[name]).any() for name, value in policy.parameters.items())


def test_the_reward_rises_on_a_bandit_with_another_arm_for_each_prompt() -> None:
    policy = small_policy()
    grpo = Grpo(policy, SETTINGS)
    rewards = []
    for step in range(SETTINGS.steps):
        stats = grpo.step(batch(policy, lambda group, token: float(token % 4 == group), step, grpo.weight_version))
        rewards.append(stats.reward)
        assert stats.logprob_gap < 1e-5
        assert stats.completed == stats.rollouts == 32
        assert stats.generated_tokens == 64
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.8
    assert grpo.weight_version == SETTINGS.steps


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_groups_whose_rewards_are_equal_carry_no_gradient(reward: float) -> None:
    policy = small_policy()
    before = policy.copy()
    stats = Grpo(policy, SETTINGS).step(batch(policy, lambda *_: reward, 0))
    assert not changed(policy, before)
    assert (stats.groups, stats.informative_groups, stats.reward, stats.gradient_norm) == (4, 0, reward, 0.0)


def test_rollouts_that_did_not_complete_count_for_nothing() -> None:
    policy = small_policy()
    before = policy.copy()
    grpo = Grpo(policy, SETTINGS)
    stats = grpo.step(batch(policy, lambda _, token: None if token % 2 else 1.0, 0))
    assert not changed(policy, before), "those with a reward all have the same"
    assert stats.completed < stats.rollouts == 32
    assert stats.reward == 1.0
    assert stats.informative_groups == 0


def test_a_step_without_any_reward_changes_nothing() -> None:
    policy = small_policy()
    before = policy.copy()
    grpo = Grpo(policy, SETTINGS)
    stats = grpo.step(batch(policy, lambda *_: None, 0))
    assert np.isnan(stats.reward)
    assert stats.generated_tokens == 0
    assert not changed(policy, before)
    assert grpo.step([]).rollouts == 0
    assert grpo.weight_version == 2


def test_advantages_are_in_standard_deviations_of_the_group() -> None:
    random = np.random.default_rng(0)
    rewards = {"a-0": 1.0, "a-1": 0.0, "a-2": 0.0, "a-3": 0.0, "b-0": 0.5, "b-1": 0.5, "c-0": 1.0}
    trajectories = [
        roll_out(small_policy(), 3, name, lambda _, r=reward: r, random)  # type: ignore[misc]
        for name, reward in rewards.items()
    ]
    advantages = group_advantages(trajectories)
    np.testing.assert_allclose(advantages[:4], (np.array([1, 0, 0, 0]) - 0.25) / np.sqrt(3 / 16), rtol=1e-6)
    assert not advantages[4:].any()


def test_the_order_of_arrival_does_not_matter() -> None:
    policies = [small_policy(), small_policy()]
    trajectories = batch(policies[0], lambda _, token: float(token < 4), 0)
    for policy, order in zip(policies, (trajectories, trajectories[::-1]), strict=True):
        Grpo(policy, SETTINGS, seed=1).step(order)
    assert not changed(*policies)


def test_a_wrong_log_prob_shows_in_the_gap_and_older_weights_do_not() -> None:
    policy = small_policy()
    trajectories = batch(policy, lambda _, token: float(token < 4), 0)
    trajectories[5].logprobs[-1] -= 0.5
    assert Grpo(policy.copy(), SETTINGS).step(trajectories).logprob_gap == pytest.approx(0.5, abs=1e-4)
    later = Grpo(policy.copy(), SETTINGS)
    later.weight_version = 1
    assert later.step(trajectories).logprob_gap == 0.0


def test_the_temperature_is_part_of_the_distribution() -> None:
    policy = small_policy()
    random = np.random.default_rng(0)
    trajectories = [
        roll_out(policy, 3, f"a-{index}", lambda token: float(token < 4), random, temperature=0.5)
        for index in range(16)
    ]
    warm = GrpoSettings(temperature=0.5)
    assert Grpo(policy.copy(), warm).step(trajectories).logprob_gap < 1e-5
    assert Grpo(policy.copy(), SETTINGS).step(trajectories).logprob_gap > 0.01


def test_a_token_that_moved_far_enough_is_left_alone() -> None:
    policy = small_policy()
    before = policy.copy()
    trajectories = batch(policy, lambda _, token: float(token < 4), 0)
    for trajectory in trajectories:  # as if the policy had moved: up where it was right, down where it was wrong
        trajectory.logprobs[trajectory.loss_mask] += -2.0 if trajectory.reward else 2.0
    stats = Grpo(policy, GrpoSettings(reference_pull=0.0)).step(trajectories)
    assert stats.clipped == 1.0
    assert not changed(policy, before)


def test_the_reference_pulls_back() -> None:
    settings = GrpoSettings(reference_pull=1e4, learning_rate=3e-3)
    policy = small_policy()
    grpo = Grpo(policy, settings)
    trajectories = batch(policy, lambda _, token: float(token < 4), 0)
    token_ids, generated = trajectories[0].token_ids, trajectories[0].loss_mask
    start = policy.logprobs(token_ids)[generated]
    policy.parameters["output_bias"] += np.linspace(-1, 1, VOCABULARY, dtype=np.float32)
    moved = np.abs(policy.logprobs(token_ids)[generated] - start).max()
    for _ in range(20):
        grpo.step(trajectories)
    assert np.abs(policy.logprobs(token_ids)[generated] - start).max() < moved / 2
