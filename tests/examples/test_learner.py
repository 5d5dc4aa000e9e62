from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from finished_groups import Turn, group, trajectory

torch = pytest.importorskip("torch", reason="the example needs torch: install the extra `train`")

from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import ConfigError
from prorl_zmq.examples.train_torch import learner as learner_module
from prorl_zmq.examples.train_torch.learner import Interrupted, Learner, LearnerSettings
from prorl_zmq.examples.train_torch.model import Model, ModelShape
from prorl_zmq.examples.train_torch.weights import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq import Group, Trajectory

SHAPE = ModelShape(vocabulary=24, context=32, width=32, layers=2, heads=2, inner=48)
SETTINGS = LearnerSettings(epochs=2)


def new_learner(settings: LearnerSettings = SETTINGS) -> Learner:
    model = Model(SHAPE, seed=0)
    return Learner(model, model, settings, seed=0)


def roll_out(model: Model, prompt: list[int], seed: int, version: int) -> list[Trajectory]:
    """Six rollouts of three tokens of the policy; the reward is 1 if the first is below 12."""
    tokens, generator = torch.tensor([prompt] * 6), torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(3):
        with torch.no_grad():
            scores = torch.log_softmax(model.logits(model.hidden(tokens)[:, -1]), dim=-1)
        token = torch.multinomial(scores.exp(), 1, generator=generator)
        drawn.append((token[:, 0].tolist(), scores.gather(1, token)[:, 0].tolist()))
        tokens = torch.cat([tokens, token], dim=1)
    rollouts = []
    for row in range(6):
        generated = [(ids[row], logprobs[row], version) for ids, logprobs in drawn]
        turns = [Turn(Role.USER, prompt[:-1]), Turn(Role.ASSISTANT, prompt[-1:], generated)]
        rollouts.append(trajectory(turns, float(generated[0][0] < 12)))
    return rollouts


def batch(model: Model, seed: int, version: int = 0) -> list[Group]:
    prompts = [[1 + index] * (2 + 3 * index) for index in range(4)]
    return [
        group(f"g{seed}-{index}", *roll_out(model, prompt, 4 * seed + index, version))
        for index, prompt in enumerate(prompts)
    ]


def parameters(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])


def test_the_reward_rises() -> None:
    learner = new_learner(replace(SETTINGS, learning_rate=2e-3, epochs=3, warm_pull=0.0))
    rewards = []
    for step in range(8):
        groups = batch(learner.model, step, learner.weight_version)
        rewards.append(float(np.mean([one.rewards.mean() for one in groups])))
        stats = learner.learn(groups)
        assert stats.logprob_gap < 1e-4
        assert stats.staleness_max == 0
        assert stats.effective_share == pytest.approx(1, abs=1e-3)
    assert learner.weight_version == 8
    assert rewards[0] < 0.7
    assert rewards[-1] > 0.85


def test_micro_batches_do_not_change_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    learners = [new_learner(replace(SETTINGS, epochs=1, minibatches=1)) for _ in range(2)]
    groups = batch(learners[0].model, 0)
    statistics = []
    for learner, limit in zip(learners, (4096, 40), strict=True):
        monkeypatch.setattr(learner_module, "MICRO_BATCH_TOKENS", limit)
        # Before Adam, whose first step is the gradient's sign: there, rounding would decide.
        statistics.append(learner.learn(groups))
    assert statistics[0].loss == pytest.approx(statistics[1].loss, rel=1e-4, abs=1e-6)
    assert statistics[0].gradient_norm == pytest.approx(statistics[1].gradient_norm, rel=1e-4)
    assert statistics[0].entropy == pytest.approx(statistics[1].entropy, rel=1e-5)


def test_a_token_counts_the_same_in_a_long_rollout_and_in_a_short_one() -> None:
    """The first step's loss is -sum(weight * advantage) / tokens, over the tokens of the whole batch."""
    learner = new_learner(replace(SETTINGS, epochs=1, minibatches=1))
    long, short = ([(5, -3.0, 0)] * count for count in (9, 1))
    turns = [[Turn(Role.USER, [1, 2]), Turn(Role.ASSISTANT, [3], said)] for said in (long, short)]
    groups = [group("a", trajectory(turns[0], 1.0), trajectory(turns[1], 0.0))]
    stats = learner.learn(groups)
    with torch.no_grad():
        model = Model(SHAPE, seed=0)
        weights = []
        for said in (long, short):
            ids = torch.tensor([[1, 2, 3, *([5] * len(said))]])
            scores = torch.log_softmax(model.logits(model.hidden(ids[:, :-1]))[0, 2:], dim=-1)[:, 5]
            weights.append((scores + 3.0).exp().clamp(max=2.0).sum().item())
    advantage = 0.5 / np.sqrt(0.5)
    assert stats.generated_tokens == 10
    assert stats.loss == pytest.approx(-(weights[0] - weights[1]) * advantage / 10, rel=1e-3)


def test_older_tokens_show_as_stale() -> None:
    learner = new_learner()
    groups = batch(learner.model, 0, version=0)
    learner.weight_version = 3
    stats = learner.learn(groups)
    assert (stats.staleness_mean, stats.staleness_max, stats.logprob_gap) == (3.0, 3, 0.0)


def test_a_wrong_log_prob_shows_in_the_gap_and_the_divergence() -> None:
    learner = new_learner()
    groups = batch(learner.model, 0)
    told = groups[0].trajectories[0]
    spoken = zip(told.token_ids[told.loss_mask].tolist(), told.logprobs[told.loss_mask].tolist(), strict=True)
    changed = [(token, logprob - 0.5, 0) for token, logprob in spoken]
    prompt = told.token_ids[~told.loss_mask].tolist()
    wrong = trajectory([Turn(Role.USER, prompt[:-1]), Turn(Role.ASSISTANT, prompt[-1:], changed)], told.reward)
    groups[0] = group("wrong", wrong, *groups[0].trajectories[1:])
    stats = learner.learn(groups)
    assert stats.logprob_gap == pytest.approx(0.5, abs=1e-3)
    assert stats.kl_behaviour > 1e-4


def test_the_warm_start_pulls_back() -> None:
    distances = []
    for pull in (0.0, 3.0):
        learner = new_learner(replace(SETTINGS, learning_rate=3e-3, warm_pull=pull))
        groups = batch(learner.model, 0)
        for _ in range(6):
            learner.weight_version = 0
            stats = learner.learn(groups)
        distances.append(stats.kl_warm)
    assert 0 < distances[1] < distances[0] / 2


def test_a_step_can_be_given_up() -> None:
    def give_up() -> None:
        raise Interrupted

    learner = new_learner()
    with pytest.raises(Interrupted):
        learner.learn(batch(learner.model, 0), give_up)
    assert learner.weight_version == 0


def test_a_resumed_learner_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    learner = new_learner()
    learner.learn(batch(learner.model, 0))
    Checkpoint(1, "session", 5, 17, learner.state()).save(tmp_path / "checkpoint.pt")
    later = batch(learner.model, 1, version=1)
    expected = learner.learn(later)

    loaded = Checkpoint.load(tmp_path / "checkpoint.pt")
    assert (loaded.step, loaded.session, loaded.seed, loaded.position) == (1, "session", 5, 17)
    resumed = Learner(Model(SHAPE, seed=9), Model(SHAPE, seed=0), SETTINGS, seed=8)
    resumed.load_state(loaded.learner)
    assert resumed.learn(later) == expected
    assert resumed.weight_version == 2
    assert torch.equal(parameters(resumed), parameters(learner))


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    Checkpoint(1, "session", 0, 1, {}).save(path)

    class Unwritable:
        def __reduce__(self) -> str:
            raise RuntimeError("cannot be written")

    with pytest.raises(RuntimeError, match="cannot be written"):
        Checkpoint(2, "session", 0, 2, {"broken": Unwritable()}).save(path)
    assert Checkpoint.load(path).step == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 broken"])
def test_what_is_no_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="not a checkpoint"):
        Checkpoint.load(tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="leave out --resume"):
        Checkpoint.load(tmp_path / "missing.pt")


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="not a checkpoint"):
        Checkpoint.load(tmp_path / "checkpoint.pt")
