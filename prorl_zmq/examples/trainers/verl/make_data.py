"""Make data/train.parquet and data/test.parquet; see README.md."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset

from prorl_zmq import Job
from prorl_zmq.integrations.dataset_rows import dataset_rows


def problems(count: int) -> list[Job]:
    """Make prompts for letters.py; put your own jobs here, such as `prorl_zmq.tasks.loading.load_jobs(FILE)`."""
    return [Job(task="letters", instance={"name": f"n{number}"}) for number in range(count)]


if __name__ == "__main__":
    Path("data").mkdir(exist_ok=True)
    rows = [{**row, "data_source": "letters"} for row in dataset_rows(problems(4160))]
    for name, part in (("train", rows[64:]), ("test", rows[:64])):
        Dataset.from_list(part).to_parquet(f"data/{name}.parquet")
