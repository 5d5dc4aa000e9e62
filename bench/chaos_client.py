"""The trainer of bench/chaos.py, one process: `python chaos_client.py FRONT_DOOR LEDGER SEED IN_FLIGHT UNTIL HANG_S`.

It keeps so many jobs going until the time `UNTIL` (on the machine's monotonic clock), then takes what is left, and ends
with 0 when each job has ended, or with 3 when nothing has come for `HANG_S`. It may be killed at any moment: all that
it knows is in the ledger, one JSON object per line, and its successor goes on from there under the same session. A job
is noted before it is submitted, so the successor submits again what may not have arrived; a result is noted before the
next request acknowledges it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

from chaos_jobs import job_name, make_job, oddity

from prorl_zmq import RolloutClient
from prorl_zmq.errors import JobsLost, ProrlError

WAIT_S = 0.5
BATCH = 8
"""Jobs submitted at a time."""
HUNG = 3
"""Exit code."""


class Ledger:
    """The file that all clients of one run write, one after the other."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            self.before = [json.loads(line) for line in file if line.endswith("}\n")]
        os.write(self._descriptor, b"\n")  # behind a line that a killed client did not end

    def note(self, event: str, **fields: Any) -> None:
        """Write one line; it is safe from a SIGKILL when this returns."""
        line = json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **fields})
        os.write(self._descriptor, line.encode() + b"\n")


class Trainer:
    """Submits and collects."""

    def __init__(self, front_door: str, ledger: Ledger, seed: int) -> None:
        self._client = RolloutClient(front_door, session=f"chaos-{seed}", timeout_s=5.0)
        self._ledger = ledger
        self._seed = seed
        numbers = {event: [each["number"] for each in ledger.before if each["event"] == event] for event in EVENTS}
        ended = {*numbers["result"], *numbers["lost"]}
        self._unsure = sorted({*numbers["intent"]} - {*numbers["accepted"]} - ended)
        self._open = {*numbers["accepted"]} - ended
        self._numbers = itertools.count(max(numbers["intent"], default=-1) + 1)

    def __len__(self) -> int:
        return len(self._open) + len(self._unsure)

    def submit(self, count: int) -> None:
        """Submit so many new jobs, after those of which nobody knows whether they arrived."""
        while len(self._unsure) < count:
            number = next(self._numbers)
            self._ledger.note("intent", number=number)
            self._unsure.append(number)
        batch = self._unsure[:BATCH]
        if batch:
            self._client.submit([make_job(self._seed, number) for number in batch])
            for number in batch:
                self._ledger.note("accepted", number=number)
            self._open.update(batch)
            del self._unsure[: len(batch)]

    def collect(self) -> int:
        """Take what has ended; give how much that was."""
        taken = self._client.collect(wait_s=WAIT_S)
        for trajectory in taken:
            number = int(trajectory.job_id.rpartition("-")[2])
            result = trajectory.result
            self._ledger.note(
                "result",
                number=number,
                outcome=result.outcome,
                attempt=result.attempt,
                code=result.error.code if result.error is not None else "",
                odd=oddity(self._seed, number, trajectory),
            )
            self._open.discard(number)
        return len(taken)

    def lost(self, error: JobsLost) -> None:
        """Note jobs that the service says are gone."""
        names = set(str(error.fields["job_ids"]).split())
        for number in [number for number in self._open if job_name(self._seed, number) in names]:
            self._ledger.note("lost", number=number)
            self._open.discard(number)

    def close(self) -> None:
        """Acknowledge, and close."""
        self._client.close()


EVENTS = ("intent", "accepted", "result", "lost")


def main() -> None:
    front_door, path, seed, in_flight, until, hang_s = sys.argv[1:]
    ledger = Ledger(path)
    trainer = Trainer(front_door, ledger, int(seed))
    ledger.note("client")
    news = time.monotonic()
    while (running := time.monotonic() < float(until)) or len(trainer):
        try:
            trainer.submit(max(0, int(in_flight) - len(trainer)) if running else 0)
            if trainer.collect():
                news = time.monotonic()
        except JobsLost as error:
            trainer.lost(error)
        except ProrlError as error:
            ledger.note("error", code=error.code, message=error.message)
        if not running and time.monotonic() > max(news, float(until)) + float(hang_s):
            sys.exit(HUNG)
    trainer.close()


if __name__ == "__main__":
    main()
