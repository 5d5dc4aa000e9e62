"""Two trainers of two adapters on one engine, for bench/models.py, each in a process of its own.

The engine is the kind `transformers` with a tiny Qwen3. The adapters learn different tasks (`models_tasks.py`) by GRPO,
with peft and torch. A trainer publishes its adapter at each step, and takes a batch of rollouts: each token must be of
the version that it published last, and its log-prob must be that of the trainer's own forward pass.

    python models_training.py FRONT_DOOR BASE FOLDER MODEL STEPS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import peft
import torch
import transformers

from prorl_zmq import EpisodeLimits, Job, RolloutClient, Sampling
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.service.child import ChildService
from prorl_zmq.weights_publisher import WeightsPublisher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq import Trajectory
    from prorl_zmq.data.group import Group

TASKS = {"a": "first_half", "b": "second_half"}
"""Of each trainer's model."""
GROUPS, GROUP, ANSWER = 4, 16, 4
"""Of a step: prompts, rollouts of each, and the tokens of a rollout."""
RANK, RATE = 8, 2e-2
STEPS = 30
LIMIT_S = 1200.0
TOPOLOGY = """\
service = {{task_modules = [{tasks}]}}
sandbox = {{kind = "process"}}
stage = [{{role = "init", slots = 16}}, {{role = "run", slots = 64}}, {{role = "eval", slots = 16}}]
[[backends]]
kind = "transformers"
name = "base"
frozen = true
model = {base}
cores = [{core}]
lora = {{slots = 2, rank = 8}}
"""


@dataclass
class Trained:
    """Result of one trainer."""

    rewards: list[float]
    """The mean of each step."""
    tokens: int = 0
    wrong: int = 0
    """Tokens of another model than the trainer's, or of another version than it published last."""
    error: float = 0.0
    """Largest difference of a log-prob to the trainer's own."""


def train(front_door: str, base: Path, folder: Path, model: str, steps: int) -> Trained:
    """Train one adapter step by step."""
    number = [*TASKS].index(model)
    torch.set_num_threads(1)
    torch.manual_seed(number)
    network = adapted(base)
    optimizer = torch.optim.Adam([one for one in network.parameters() if one.requires_grad], RATE)
    trained = Trained([])
    jobs = [
        Job(
            task=TASKS[model],
            instance={"name": f"n{prompt}"},
            model=model,
            sampling=Sampling(max_tokens=ANSWER),
            episode=EpisodeLimits(max_turns=1),
        )
        for prompt in range(GROUPS)
    ]
    with (
        RolloutClient(front_door, timeout_s=120) as client,
        WeightsPublisher(client, base, folder, model=model, lora=True) as publisher,
    ):
        for version in range(1 + 1000 * number, 1 + 1000 * number + steps):
            publisher.publish(network, version)
            with client.open_batch(GROUPS, GROUP, keep="all", carry="nothing", model=model) as batch:
                batch.feed(jobs, last=True)
                groups = list(batch)
            assert len(groups) == GROUPS
            learn(network, optimizer, groups, trained)
            for group in groups:
                for one in group.trajectories:
                    right = (one.weight_versions[one.loss_mask] == version) & (one.result.model == model)
                    trained.tokens += len(right)
                    trained.wrong += int((~right).sum())
    return trained


def adapted(base: Path) -> Any:
    """Give the base model with a new adapter, which changes nothing yet."""
    network = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=4 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(network, config)


def learn(network: Any, optimizer: torch.optim.Optimizer, groups: Sequence[Group], trained: Trained) -> None:
    """Take one step on a batch, and note its mean reward and how far the engine's log-probs are from the trainer's."""
    loss, answers, reward = torch.zeros(()), GROUPS * GROUP, 0.0
    for group in groups:
        rewards = group.rewards
        reward += float(rewards.mean()) / len(groups)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for one, advantage in zip(group.trajectories, advantages, strict=True):
            own = logprobs_of(network, one)
            gaps = np.abs(own.detach().numpy() - one.logprobs[one.loss_mask])
            trained.error = max(trained.error, float(gaps.max()))
            loss = loss - float(advantage) * own.mean() / answers
    trained.rewards.append(reward)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def logprobs_of(network: Any, trajectory: Trajectory) -> torch.Tensor:
    """Give the network's log-probs of a trajectory's generated tokens, float32 [G]."""
    ids = torch.tensor(trajectory.token_ids.astype(np.int64))
    logits = network(input_ids=ids[None, :-1]).logits[0]
    logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    return logprobs[torch.tensor(trajectory.loss_mask[1:])]


def measure_training(steps: int) -> dict[str, Trained]:
    """Serve the base model, and run both trainers at a time; return each result, by model."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as place:
        folder = Path(place)
        base = folder / "base"
        make(base)
        tasks = json.dumps(str(Path(__file__).with_name("models_tasks.py")))
        topology = TOPOLOGY.format(tasks=tasks, base=json.dumps(str(base)), core=max(os.sched_getaffinity(0)))
        with ChildService(folder, topology) as service:
            with RolloutClient(service.front_door, timeout_s=60) as client:
                service.wait_ready(client)
            trainers = {}
            for model in TASKS:
                arguments = (service.front_door, str(base), str(folder / model), model, str(steps))
                command = [sys.executable, __file__, *arguments]
                trainers[model] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                said = {model: trainer.communicate(timeout=LIMIT_S)[0] for model, trainer in trainers.items()}
            finally:
                for trainer in trainers.values():
                    trainer.kill()
                    trainer.wait()
            assert all(trainer.returncode == 0 for trainer in trainers.values())
    return {model: Trained(**json.loads(line)) for model, line in said.items()}


if __name__ == "__main__":
    where, base, folder, model, steps = sys.argv[1:]
    print(json.dumps(asdict(train(where, Path(base), Path(folder), model, int(steps)))))
