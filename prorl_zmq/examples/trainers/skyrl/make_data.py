"""Write the data set for SkyRL: train.jsonl and val.jsonl; see README.md."""

from __future__ import annotations

import json
from pathlib import Path

from prorl_zmq import Job
from prorl_zmq.integrations.skyrl import dataset_rows


def problems(count: int) -> list[Job]:
    """Make prompts for letters.py; put your own jobs here, such as `prorl_zmq.tasks.loading.load_jobs(FILE)`."""
    return [Job(task="letters", instance={"name": f"n{number}"}) for number in range(count)]


def main() -> None:
    """Write both files."""
    rows = dataset_rows(problems(1100))
    for name, part in (("train", rows[100:]), ("val", rows[:100])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


if __name__ == "__main__":
    main()
