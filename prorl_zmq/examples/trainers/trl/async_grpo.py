"""TRL's AsyncGRPOTrainer learns sums on a GPU, while prorl_zmq goes on with rollouts; see README.md."""

from __future__ import annotations

import argparse
from functools import partial

from datasets import Dataset
from grpo import problems
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from prorl_zmq import EpisodeLimits, RolloutClient
from prorl_zmq.integrations.trl import RolloutWorker, WeightTransfer, dataset_rows, job_maker


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model that the engines serve")
    parser.add_argument("--out", default="out", help="folder for checkpoints and weights; engine hosts see it too")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, per process")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of AdamW")
    parser.add_argument("--save-steps", type=int, default=50, help="steps between two checkpoints; the last two stay")
    parser.add_argument("--connect", help="the service's front door (default: that of `prorl serve`)")
    parser.add_argument("--log", action="append", default=[], help="a tracker of TRL's, such as wandb; may be repeated")
    options = parser.parse_args()
    args = AsyncGRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        num_generations=options.group,
        max_completion_length=2048,
        learning_rate=options.lr,
        save_steps=options.save_steps,
        save_total_limit=2,
        token_budget=-1,  # by the number of samples; None would ask a vLLM server of TRL's own
        max_staleness=2,
        logging_steps=1,
        report_to=options.log,
    )
    connect = partial(RolloutClient, options.connect) if options.connect else RolloutClient
    data = Dataset.from_list(dataset_rows(problems(1000)))
    make_job = job_maker(EpisodeLimits(max_turns=1), max_tokens=512)
    trainer = AsyncGRPOTrainer(
        options.model,
        args=args,
        train_dataset=data,
        rollout_worker=RolloutWorker(data, args, connect=connect, make_job=make_job),
        weight_transfer=WeightTransfer(options.model, f"{options.out}/weights", connect=connect),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
