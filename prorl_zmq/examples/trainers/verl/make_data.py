"""Make data/train.parquet and data/test.parquet; see README.md."""

from __future__ import annotations

import random
from pathlib import Path

from datasets import Dataset

from prorl_zmq import Job
from prorl_zmq.integrations.dataset_rows import dataset_rows


def problems(count: int, seed: int) -> list[Job]:
    """Make sums of two numbers; put your own jobs here, such as `prorl_zmq.tasks.loading.load_jobs(FILE)`."""
    numbers = random.Random(seed)  # noqa: S311
    jobs = []
    for _ in range(count):
        one, other = numbers.randrange(100), numbers.randrange(100)
        instance = {"problem": f"What is {one} + {other}?", "ground_truth": str(one + other)}
        jobs.append(Job(task="math", instance=instance))
    return jobs


if __name__ == "__main__":
    Path("data").mkdir(exist_ok=True)
    for name, count in (("train", 4096), ("test", 64)):
        rows = [{**row, "data_source": "sums"} for row in dataset_rows(problems(count, seed=count))]
        Dataset.from_list(rows).to_parquet(f"data/{name}.parquet")
