"""Write rows of sums for NeMo Gym; see README.md."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from prorl_zmq import Job
from prorl_zmq.integrations.dataset_rows import dataset_rows


def problems(count: int) -> list[Job]:
    """Make sums of two numbers; put your own jobs here, such as `prorl_zmq.tasks.loading.load_jobs(FILE)`."""
    numbers = random.Random(0)  # noqa: S311
    jobs = []
    for _ in range(count):
        one, other = numbers.randrange(100), numbers.randrange(100)
        instance = {"problem": f"What is {one} + {other}?", "ground_truth": str(one + other)}
        jobs.append(Job(task="math", instance=instance))
    return jobs


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=2)
    options = parser.parse_args()
    rows = [
        {"responses_create_params": {"input": row.pop("prompt")}, **row}
        for row in dataset_rows(problems(options.count))
    ]
    options.file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
