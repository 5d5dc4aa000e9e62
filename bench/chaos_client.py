"""The trainer of bench/chaos.py, one process: `python chaos_client.py OPTIONS`, where OPTIONS is JSON (see `Options`).

It keeps a number of jobs in flight until the time `until`, then collects the rest, and exits with 0 when each job has
ended, or with 3 when no result has come for `hang_s`. Meanwhile it gives the engines new weights, each version once. It
may be killed at any moment: all its state is in the ledger, one JSON object per line, and its successor continues from
there under the same session. A job is recorded before it is submitted, so the successor resubmits jobs that may not
have arrived; a result is recorded before the next request acknowledges it. Several trainers may share a ledger, each
with its own numbers; the first of them gives weights.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from typing import Any

import msgspec
from chaos_account import read_event
from chaos_jobs import is_saboteurs, job_name, make_job, oddity

from prorl_zmq import RolloutClient
from prorl_zmq.errors import JobsLost, ProrlError

WAIT_S = 0.5
PAUSE_S = 0.1
"""After an error."""
BATCH = 8
"""Jobs submitted at a time."""
HUNG = 3
"""Exit code."""
UPDATE_EVERY_S = 5.0
UPDATE_LIMIT_S = 10.0


class Options(msgspec.Struct, frozen=True):
    """What it is to do."""

    place: dict[str, str]
    """By what a client finds the service: `endpoint` and `keys`, or `service`."""
    session: str
    first: int
    step: int
    """Its jobs have the numbers `first`, `first + step` and so on: other trainers have those between."""
    ledger: str
    weights: str
    """The file that is every version's weights."""
    seed: int
    in_flight: int
    """How many jobs it keeps going."""
    until: float
    """On the machine's monotonic clock."""
    hang_s: float
    saboteurs: bool


class Ledger:
    """The file that all clients of one run write, one after the other."""

    def __init__(self, path: str) -> None:
        self._turn = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            self.before = [event for line in file if (event := read_event(line)) is not None]
        os.write(self._descriptor, b"\n")  # behind a line that a killed client did not end

    def note(self, event: str, **fields: Any) -> None:
        """Write one line; it is safe from a SIGKILL when this returns."""
        line = json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **fields})
        with self._turn:
            os.write(self._descriptor, line.encode() + b"\n")


class Weights(threading.Thread):
    """Gives the engines a new version every few seconds; notes each that all of them have taken."""

    def __init__(self, options: Options, ledger: Ledger) -> None:
        super().__init__(daemon=True)
        self._options = options
        self._ledger = ledger
        begun = (event["version"] for event in ledger.before if event["event"] == "update")
        self._versions = itertools.count(max(begun, default=0) + 1)

    def run(self) -> None:
        """Update until the end of the process; the next one continues as the same trainer."""
        place = {**self._options.place, "session": f"{self._options.session}-weights"}
        with RolloutClient(**place, timeout_s=UPDATE_LIMIT_S) as client:
            for version in self._versions:
                time.sleep(UPDATE_EVERY_S)
                self._ledger.note("update", version=version)
                try:
                    client.update_weights(self._options.weights, version)
                except ProrlError as error:
                    self._ledger.note("no update", version=version, code=error.code, message=error.message)
                else:
                    self._ledger.note("weights", version=version)


class Trainer:
    """Submits and collects."""

    def __init__(self, options: Options, ledger: Ledger) -> None:
        self._seed = options.seed
        self._saboteurs = options.saboteurs
        self._client = RolloutClient(**options.place, session=options.session, timeout_s=5.0)
        self._ledger = ledger
        noted = [(each["event"], each["number"]) for each in ledger.before if each["event"] in EVENTS]
        own = [(event, number) for event, number in noted if number % options.step == options.first]
        numbers = {each: [number for event, number in own if event == each] for each in EVENTS}
        ended = {*numbers["result"], *numbers["lost"]}
        self._unsure = sorted({*numbers["intent"]} - {*numbers["accepted"]} - ended)
        self._open = {*numbers["accepted"]} - ended
        last = max(numbers["intent"], default=options.first - options.step)
        self._numbers = itertools.count(last + options.step, options.step)

    def __len__(self) -> int:
        return len(self._open) + len(self._unsure)

    def submit(self, count: int) -> None:
        """Submit so many new jobs, after those whose arrival is unknown."""
        while len(self._unsure) < count:
            number = next(self._numbers)
            self._ledger.note("intent", number=number)
            self._unsure.append(number)
        batch = self._unsure[:BATCH]
        if batch:
            self._client.submit([make_job(self._seed, number, saboteurs=self._saboteurs) for number in batch])
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
                odd=oddity(self._seed, number, trajectory, saboteurs=self._saboteurs),
                saboteurs=self._saboteurs and is_saboteurs(number),
                reward=trajectory.reward,
                version=min(trajectory.versions, default=None),
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
    options = msgspec.json.decode(sys.argv[1], type=Options)
    ledger = Ledger(options.ledger)
    trainer = Trainer(options, ledger)
    ledger.note("client")
    if options.first == 0:
        Weights(options, ledger).start()
    news = time.monotonic()
    while (running := time.monotonic() < options.until) or len(trainer):
        try:
            trainer.submit(max(0, options.in_flight - len(trainer)) if running else 0)
            if trainer.collect():
                news = time.monotonic()
        except JobsLost as error:
            trainer.lost(error)
        except ProrlError as error:
            ledger.note("error", code=error.code, message=error.message)
            time.sleep(PAUSE_S)
        if not running and time.monotonic() > max(news, options.until) + options.hang_s:
            sys.exit(HUNG)
    trainer.close()


if __name__ == "__main__":
    main()
