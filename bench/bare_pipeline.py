"""A bare ZeroMQ pipeline, the peer of bench/frontdoor.py: the service's sockets, hops and frames, without logic.

    client REQ ⇄ ROUTER broker PUSH → PULL stage (INIT, RUN, EVAL)
                               PULL ← PUSH stage

Each frame is as long as the service's own for a job that does nothing. The broker counts, and keeps, decodes, decides
and writes nothing; so the pipeline measures the least cost of a job's hops in any Python service.

`bare_pipeline.py broker|init|run|eval FOLDER` is one of its processes; `BarePipeline` starts them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Self

import zmq

from prorl_zmq import Job
from prorl_zmq.client.requests import JOBS_PER_REQUEST
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.front_door import Collect
from prorl_zmq.wire.messages.jobs import Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import EventsNoted, PhaseDone, StartPhase
from prorl_zmq.wire.sockets import open_socket, split_envelope

BATCH = 256
RESULTS = 64
"""Most in one reply, as `RolloutClient.stream` asks for them."""
STAGES = tuple(Phase)
TIMINGS = {f"{phase}{what}": 0.000123456 for phase in Phase for what in ("", "_queue")}


def frame_of(message: object) -> bytes:
    """Return a frame as long as a message's."""
    return bytes(len(codec.encode(message)))  # type: ignore[arg-type]


JOB = frame_of(Job(task="nothing", instance={}))
START = frame_of(StartPhase(job_id=new_id(), attempt=1, phase=Phase.INIT))
DONE = frame_of(
    PhaseDone(
        stage_id=f"init-{new_id()[:12]}", job_id=new_id(), attempt=1, phase=Phase.INIT, number=1, timings={"init": 0.1}
    )
)[1:]  # the stage's place comes before it
NOTED = frame_of(EventsNoted(tuple(range(1000, 1016))))
RESULT = frame_of(
    Result(job_id=new_id(), task="nothing", outcome=Outcome.COMPLETED, reward=1.0, timings=TIMINGS),
)
COLLECT = frame_of(Collect(new_id(), new_id(), new_id(), (new_id(),) * RESULTS, max_results=RESULTS, wait_s=10.0))


class BarePipeline:
    """Runs for as long as its context."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="prorl-bench-")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def __enter__(self) -> Self:
        for name in ("broker", *STAGES):
            self._processes[name] = subprocess.Popen(
                [sys.executable, __file__, name, self._folder.name],
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads of ours yet
            )
        self._line = open_socket(self._context, zmq.REQ)
        self._line.connect(f"ipc://{self._folder.name}/front_door")
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(20)
        self._folder.cleanup()

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def pass_jobs(self, count: int) -> float:
        """Have so many jobs pass; return the seconds from the first request to the last reply."""
        started = time.perf_counter()
        for first in range(0, count, JOBS_PER_REQUEST):
            self._line.send_multipart([COLLECT, *[JOB] * min(JOBS_PER_REQUEST, count - first)])
            self._line.recv()
        got = 0
        while got < count:
            self._line.send(COLLECT)
            got += len(self._line.recv()) // len(RESULT)
        return time.perf_counter() - started


def broker(context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
    """Pass on what comes."""
    door, events = open_socket(context, zmq.ROUTER), open_socket(context, zmq.PULL)
    door.bind(f"ipc://{folder}/front_door")
    events.bind(f"ipc://{folder}/events")
    stages = [open_socket(context, zmq.PUSH) for _ in STAGES]
    for stage, name in zip(stages, STAGES, strict=True):
        stage.connect(f"ipc://{folder}/{name}")
    poller = zmq.Poller()
    poller.register(door, zmq.POLLIN)
    poller.register(events, zmq.POLLIN)
    held: list[bytes] = []
    done = 0
    while True:
        ready = dict(poller.poll())
        if events in ready:
            ended = set()
            for frames in received(events):
                place = frames[0][0]
                ended.add(place)
                if place + 1 < len(stages):
                    stages[place + 1].send_multipart([START, JOB])
                else:
                    done += 1
            for place in ended:
                stages[place].send(NOTED)
        if door in ready:
            for frames in received(door):
                envelope, (_, *jobs) = split_envelope(frames)
                for job in jobs:
                    stages[0].send_multipart([START, job])
                if jobs:
                    door.send_multipart([*envelope, NOTED])
                else:
                    held = envelope
        if held and done:
            results = min(done, RESULTS)
            door.send_multipart([*held, RESULT * results])
            done, held = done - results, []


def stage(context: zmq.Context[zmq.Socket[bytes]], folder: str, name: str) -> None:
    """Answer each job at once."""
    jobs, events = open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH)
    jobs.bind(f"ipc://{folder}/{name}")
    events.connect(f"ipc://{folder}/events")
    done = bytes([STAGES.index(Phase(name))]) + DONE
    while True:
        jobs.poll()
        for frames in received(jobs):
            if len(frames) == len((START, JOB)):
                events.send(done)


def received(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Receive what is there."""
    messages: list[list[bytes]] = []
    try:
        while len(messages) < BATCH:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages


def main() -> None:
    name, folder = sys.argv[1:]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if name == "broker":
        broker(context, folder)
    else:
        stage(context, folder, name)


if __name__ == "__main__":
    main()
