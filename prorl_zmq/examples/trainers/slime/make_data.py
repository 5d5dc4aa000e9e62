"""Make train.jsonl; see README.md."""

from __future__ import annotations

import json
import random
from pathlib import Path

from prorl_zmq import Job


def problems(count: int) -> list[Job]:
    """Make sums of two numbers; put your own jobs here, such as `prorl_zmq.tasks.loading.load_jobs(FILE)`."""
    numbers = random.Random(0)  # noqa: S311
    jobs = []
    for _ in range(count):
        one, other = numbers.randrange(100), numbers.randrange(100)
        instance = {"problem": f"What is {one} + {other}?", "ground_truth": str(one + other)}
        jobs.append(Job(task="math", instance=instance))
    return jobs


def row(job: Job) -> dict[str, object]:
    """Return slime's row: the messages are for people, the metadata are the job."""
    text = json.dumps(job.instance)
    return {
        "messages": [{"role": "user", "content": text}],
        "metadata": {"task": job.task, "instance": job.instance},
    }


if __name__ == "__main__":
    Path("train.jsonl").write_text("".join(json.dumps(row(job)) + "\n" for job in problems(4096)), encoding="utf-8")
