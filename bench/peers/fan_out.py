"""A bare PUSH to PULL workers, one process each: `python fan_out.py JOBS_ENDPOINT RESULTS_ENDPOINT`.

A worker takes a job (its number and its seconds), sleeps, and pushes the number, its start and its end.
"""

from __future__ import annotations

import struct
import sys
import time

import zmq

JOB = struct.Struct("<id")
RESULT = struct.Struct("<idd")


def main() -> None:
    jobs_endpoint, results_endpoint = sys.argv[1:]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    jobs = context.socket(zmq.PULL)
    results = context.socket(zmq.PUSH)
    results.connect(results_endpoint)
    jobs.connect(jobs_endpoint)
    results.send(RESULT.pack(-1, 0.0, 0.0))
    while True:
        number, seconds = JOB.unpack(jobs.recv())
        started = time.monotonic()
        time.sleep(seconds)
        results.send(RESULT.pack(number, started, time.monotonic()))


if __name__ == "__main__":
    main()
