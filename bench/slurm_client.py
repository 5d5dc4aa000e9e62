"""A trainer on the login host of bench/slurm.py: `python slurm_client.py SERVICE NAME LEAST IN_FLIGHT ATTEMPTS`.

It keeps IN_FLIGHT jobs under way until the file `NAME.stop` exists and at least LEAST have ended, and then collects the
rest. Each result is a line of `NAME.jsonl`. A job has its own reward, which its check script returns only if it finds
the file that INIT placed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from prorl_zmq import Job, RolloutClient, Sampling, Trajectory
from prorl_zmq.errors import ProrlError
from prorl_zmq.wire.messages.jobs import EpisodeLimits

CHECK_S = (1, 2, 4)
"""How long the check scripts take, in turn."""


def make_job(name: str, number: int, attempts: int) -> Job:
    job_id = f"{name}-{number}"
    sleep = f"sleep {CHECK_S[number % len(CHECK_S)]}"
    instance = {
        "instruction": f"Keep {job_id} as it is.",
        "files": {"word": job_id},
        "check": f'{sleep}; [ "$(cat word)" = {job_id} ] && echo "reward: {expected_reward(number)}"',
    }
    return Job(
        task="shell",
        instance=instance,
        job_id=job_id,
        sampling=Sampling(max_tokens=8, seed=number),
        episode=EpisodeLimits(max_turns=1),
        max_attempts=attempts,
    )


def expected_reward(number: int) -> float:
    return (number % 997 + 1) / 1000


def line(one: Trajectory) -> str:
    right = one.reward == expected_reward(int(one.job_id.rpartition("-")[2]))
    error = one.error.message if one.error is not None else ""
    result = {"job_id": one.job_id, "outcome": one.outcome, "attempt": one.result.attempt, "right": right}
    return json.dumps({**result, "error": error, "at": time.monotonic()}) + "\n"


def main(service: str, name: str, least: int, in_flight: int, attempts: int) -> None:
    """Submit and collect."""
    stop, submitted, ended = Path(f"{name}.stop"), 0, 0
    with RolloutClient(service=service, session=name, timeout_s=120) as client, Path(f"{name}.jsonl").open("a") as file:
        while True:
            more = ended < least or not stop.exists()
            if more and (free := in_flight - (submitted - ended)) > 0:
                client.submit([make_job(name, submitted + each, attempts) for each in range(free)])
                submitted += free
            try:
                results = client.collect(wait_s=1.0)
            except ProrlError as error:
                print(error, file=sys.stderr)
                continue
            file.writelines(map(line, results))
            file.flush()
            ended += len(results)
            if not more and ended >= submitted:
                break
    print(submitted)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
