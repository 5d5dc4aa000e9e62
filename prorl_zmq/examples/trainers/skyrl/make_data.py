"""Write the data set of sums for SkyRL: train.jsonl and val.jsonl; see README.md."""

from __future__ import annotations

import json
import random
from pathlib import Path

from prorl_zmq import Job
from prorl_zmq.integrations.skyrl import dataset_rows


def problems(count: int, seed: int) -> list[Job]:
    """Make sums of two numbers; put your own jobs here, such as `prorl_zmq.tasks.loading.load_jobs(FILE)`."""
    numbers = random.Random(seed)  # noqa: S311
    jobs = []
    for _ in range(count):
        one, other = numbers.randrange(100), numbers.randrange(100)
        instance = {"problem": f"What is {one} + {other}?", "ground_truth": str(one + other)}
        jobs.append(Job(task="math", instance=instance))
    return jobs


def main() -> None:
    """Write both files."""
    for seed, (name, count) in enumerate((("train", 1000), ("val", 100))):
        rows = dataset_rows(problems(count, seed))
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
