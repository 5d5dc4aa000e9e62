"""TRL (1.16): rollouts and weights for `GRPOTrainer` and `AsyncGRPOTrainer`. Needs the extra `[trl]`.

    with GrpoRollouts("models/qwen3-8b", "/shared/weights") as rollouts:
        trainer = GRPOTrainer(model, rollout_reward, train_dataset=data, rollout_func=rollouts, args=args)
        trainer.train()

The data set has the columns `prompt`, `task` and `instance` (`dataset_rows` makes them from jobs). The service has the
chat templates, tools and rewards; TRL's loop, loss and optimizer are unchanged.
"""

from ..dataset_rows import dataset_rows, job_maker
from .async_grpo import RolloutWorker, WeightTransfer
from .callbacks import Evaluations, RewardLines, continue_from
from .distillation import DistillationWorker
from .grpo import GrpoRollouts, rollout_reward

__all__ = [
    "DistillationWorker",
    "Evaluations",
    "GrpoRollouts",
    "RewardLines",
    "RolloutWorker",
    "WeightTransfer",
    "continue_from",
    "dataset_rows",
    "job_maker",
    "rollout_reward",
]
