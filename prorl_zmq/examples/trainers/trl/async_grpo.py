"""TRL's AsyncGRPOTrainer learns to write letters, while prorl_zmq continues the rollouts; see README.md."""

from __future__ import annotations

import argparse
from functools import partial

from datasets import Dataset
from grpo import MAX_TOKENS, problems
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from prorl_zmq import EpisodeLimits, RolloutClient
from prorl_zmq.integrations import trl as prorl
from prorl_zmq.integrations.trl.on_cpu import use_cpu


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model that the engines serve")
    parser.add_argument("--out", default="out", help="folder for checkpoints and weights; engine hosts see it too")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, per process")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW; 1e-6 for a pretrained model")
    parser.add_argument("--save-steps", type=int, default=50, help="steps between two checkpoints; the last two stay")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between two evaluations; 0: none")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, in float32, slowly")
    parser.add_argument("--connect", help="the service's front door (default: that of `prorl serve`)")
    parser.add_argument("--log", action="append", default=[], help="a tracker of TRL's, such as wandb; may be repeated")
    options = parser.parse_args()
    if options.cpu:
        use_cpu()
    args = AsyncGRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        num_generations=options.group,
        max_completion_length=2048,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        save_steps=options.save_steps,
        save_total_limit=2,
        token_budget=-1,  # by the number of samples; None would ask a vLLM server of TRL's own
        max_staleness=2,
        bf16=not options.cpu,
        use_cpu=options.cpu,
        logging_steps=1,
        disable_tqdm=True,
        report_to=options.log,
    )
    connect = partial(RolloutClient, options.connect) if options.connect else RolloutClient
    rows = prorl.dataset_rows(problems(1064))
    data, held_out = Dataset.from_list(rows[64:]), rows[:64]
    make_job = prorl.job_maker(EpisodeLimits(max_turns=1), max_tokens=MAX_TOKENS)
    worker = prorl.RolloutWorker(data, args, connect=connect, make_job=make_job)
    transfer = prorl.WeightTransfer(options.model, f"{options.out}/weights", connect=connect)
    trainer = AsyncGRPOTrainer(
        options.model,
        args=args,
        train_dataset=data,
        rollout_worker=worker,
        weight_transfer=transfer,
        callbacks=[prorl.RewardLines(worker)],
    )
    if every := options.eval_every:
        trainer.add_callback(prorl.Evaluations(trainer, held_out, every, connect=connect, make_job=make_job))
    checkpoint = get_last_checkpoint(options.out) if options.resume else None
    if checkpoint:
        prorl.continue_from(trainer, transfer, checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)  # the engines have the last step's weights when it returns
    trainer.save_model()


if __name__ == "__main__":
    main()
