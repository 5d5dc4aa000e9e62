"""TRL's GRPOTrainer learns to write letters, with rollouts by prorl_zmq; see README.md."""

from __future__ import annotations

import argparse
from functools import partial

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from prorl_zmq import EpisodeLimits, Job, RolloutClient
from prorl_zmq.integrations.trl import GrpoRollouts, RewardLines, dataset_rows, job_maker, rollout_reward

MAX_TOKENS = 16  # of an answer


def problems(count: int) -> list[Job]:
    """Make prompts for letters.py; put your own jobs here, such as `prorl_zmq.tasks.loading.load_jobs(FILE)`."""
    return [Job(task="letters", instance={"name": f"n{number}"}) for number in range(count)]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model that the engines serve")
    parser.add_argument("--out", default="out", help="folder for checkpoints and weights; engine hosts see it too")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--batch", type=int, default=32, help="rollouts of a step, per process")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW; 1e-6 for a pretrained model")
    parser.add_argument("--save-steps", type=int, default=50, help="steps between two checkpoints; the last two stay")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between two evaluations; 0: none")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, in float32")
    parser.add_argument("--connect", help="the service's front door (default: that of `prorl serve`)")
    parser.add_argument("--log", action="append", default=[], help="a tracker of TRL's, such as wandb; may be repeated")
    options = parser.parse_args()
    args = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        num_generations=options.group,
        max_completion_length=2048,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        save_steps=options.save_steps,
        save_total_limit=2,
        eval_strategy="steps" if options.eval_every else "no",
        eval_steps=options.eval_every or None,
        per_device_eval_batch_size=options.batch,
        bf16=not options.cpu,
        use_cpu=options.cpu,
        logging_steps=1,
        disable_tqdm=True,
        report_to=options.log,
    )
    connect = partial(RolloutClient, options.connect) if options.connect else RolloutClient
    make_job = job_maker(EpisodeLimits(max_turns=1), max_tokens=MAX_TOKENS)
    rows = dataset_rows(problems(1064))
    data, held_out = Dataset.from_list(rows[64:]), Dataset.from_list(rows[:64])
    with GrpoRollouts(options.model, f"{options.out}/weights", connect=connect, make_job=make_job) as rollouts:
        trainer = GRPOTrainer(
            options.model,
            rollout_reward,
            args=args,
            train_dataset=data,
            eval_dataset=held_out if options.eval_every else None,
            rollout_func=rollouts,
            callbacks=[RewardLines(rollouts)],
        )
        trainer.train(resume_from_checkpoint=options.resume or None)
        rollouts.sync_weights()  # those of the last step, which no rollouts have asked for
        trainer.save_model()


if __name__ == "__main__":
    main()
