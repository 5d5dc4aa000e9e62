"""The overlap of learning and rollouts: TRL's unmodified `AsyncGRPOTrainer`, through a whole service on a CPU.

A rollout waits first, as for a sandbox and its tools, and then generates one turn with the engine kind `transformers`.
The same step is measured three times in one run: rollouts without a trainer, learning from existing samples, and both.
All include opening batches, and giving the engine each step's weights.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the trainer has one core, the service the other

import queue
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import Incomplete, Row, main

sys.path.append(str(Path(__file__).parents[1] / "tests"))

if TYPE_CHECKING:
    from prorl_zmq.integrations.trl import RolloutWorker

SAMPLES, GROUP = 64, 8
WAIT_S = 0.6
TOKENS = 48
TARGET = 1.15
WARM_UP = 3
"""Steps that are not counted: imports, first batches."""


class Recorded:
    """Stands for a worker whose samples are there already."""

    def __init__(self, samples: list[Any]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._samples = samples

    def start(self) -> None:
        """Give all samples, and some twice: TRL fetches ahead of its last step."""
        for sample in [*self._samples, *self._samples[: 2 * SAMPLES]]:
            self.rollout_buffer.put(sample)

    def stop(self) -> None:
        """Nothing."""

    def update_model_version(self, model_version: int) -> None:
        """Nothing."""

    def check_health(self, stale_after_s: float) -> None:
        """Nothing."""


def rolled_out(worker: RolloutWorker, steps: int) -> tuple[float, list[Any]]:
    """Give the seconds per step without a trainer, and the samples of so many steps."""
    samples: list[Any] = []
    ends = []
    worker.start()
    for _ in range(WARM_UP + steps):
        samples += [worker.rollout_buffer.get(timeout=120) for _ in range(SAMPLES)]
        ends.append(time.monotonic())
    worker.stop()
    return (ends[-1] - ends[WARM_UP - 1]) / steps, samples


def trained(folder: Path, model: Path, arguments: Any, data: Any, worker: Any, connect: Any) -> float:
    """Give the seconds per step of the trainer."""
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from prorl_zmq.integrations.trl import WeightTransfer

    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

    trainer = AsyncGRPOTrainer(
        str(model),
        args=arguments,
        train_dataset=data,
        rollout_worker=worker,
        weight_transfer=WeightTransfer(model, folder / "weights", connect=connect),
        callbacks=[Clock()],
    )
    trainer.train()
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def measure(quick: bool) -> list[Row]:
    try:
        import trl  # noqa: F401
    except ImportError:
        raise Incomplete("TRL is not installed: make .venv/.train", []) from None
    import trained as shared
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from prorl_zmq import EpisodeLimits, Job, RolloutClient
    from prorl_zmq.integrations.trl import RolloutWorker, dataset_rows, job_maker
    from prorl_zmq.integrations.trl.on_cpu import use_cpu

    steps = 3 if quick else 15
    jobs = [Job(task="letters", instance={"name": f"n{number}", "wait_s": WAIT_S}) for number in range(64)]
    with (
        tempfile.TemporaryDirectory(prefix="prorl-bench-") as place,
        shared.models() as models,
        shared.service_of(models / "plain", slots=SAMPLES) as service,
    ):
        use_cpu()
        data = Dataset.from_list(dataset_rows(jobs))

        def connect() -> RolloutClient:
            return RolloutClient(service.front_door, timeout_s=90)

        def arguments(name: str) -> Any:
            return AsyncGRPOConfig(
                output_dir=f"{place}/{name}",
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=SAMPLES,
                num_generations=GROUP,
                max_steps=WARM_UP + steps,
                learning_rate=1e-4,
                token_budget=-1,
                max_staleness=1000,  # recorded samples are of the first weights
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                report_to=[],
            )

        def worker(name: str) -> RolloutWorker:
            make_job = job_maker(EpisodeLimits(max_turns=1), max_tokens=TOKENS)
            return RolloutWorker(data, arguments(name), connect=connect, make_job=make_job)

        rollouts_s, samples = rolled_out(worker("rollouts"), steps)
        learning_s, both_s = (
            trained(Path(place, name), models / "plain", arguments(name), data, source, connect)
            for name, source in (("learning", Recorded(samples)), ("both", worker("both")))
        )
    longer = max(rollouts_s, learning_s)
    return [
        Row(
            f"AsyncGRPO, {SAMPLES} rollouts a step: a step with rollouts and learning at once",
            both_s,
            "s",
            "the longer of both alone",
            both_s / longer,
            f"at most {TARGET:g}×",
            both_s / longer <= TARGET,
        ),
        Row("rollouts alone", rollouts_s, "s", "both one after the other", rollouts_s / (rollouts_s + learning_s)),
        Row("learning alone", learning_s, "s", "both one after the other", learning_s / (rollouts_s + learning_s)),
    ]


if __name__ == "__main__":
    main("async_grpo", "how well rollouts and learning overlap in TRL's AsyncGRPOTrainer", measure)
