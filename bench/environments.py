"""What it costs to play environments in worker processes: GEM's guessing game through a whole service.

CPU is that of the service's process, in which brokers, stages and a scripted engine run, and of the workers. What the
agent loop takes by itself is measured on conversations of the same texts without an environment, and subtracted. The
peers: GEM in one process per rollout, as a program that is started for each would have it, and GEM stepped bare. GEM is
run by the interpreter of `prorl env install gem`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import uvloop
from harness import Incomplete, Row, main, quantiles

from prorl_zmq import Job, Outcome, Role
from prorl_zmq.errors import EnvironmentFailed
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.environments.environment_pool import EnvironmentPool
from prorl_zmq.stages.environments.environment_store import EnvironmentStore
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, PhaseData, RunPhase
from prorl_zmq.stages.handlers.environment import EnvironmentHandler
from prorl_zmq.testing import LocalService, say

if TYPE_CHECKING:
    from prorl_zmq.stages.environments.environment_template import EnvironmentPlace

GAME, SEED, GUESSES = "game:GuessTheNumber-v0-hard", 1, (3, 7, 12, 18, 22, 31, 41, 44)
INSTANCE = {"environment": "gem", "args": {"id": GAME}, "seed": SEED}
ROLLOUTS, PROCESSES, STEPS, KILLS = 128, 5, 1000, 20
QUICK_ROLLOUTS, QUICK_PROCESSES, QUICK_STEPS, QUICK_KILLS = 16, 1, 200, 2
RECOVERY_S = 3.0
BARE = r"""
import json, resource, sys, time
import gem
game, seed, guesses, rollouts = json.loads(sys.argv[1])
def play():
    world = gem.make(game)
    seen, times = [world.reset(seed=seed)[0]], []
    for guess in guesses:
        began = time.perf_counter()
        text, reward, done, truncated, _ = world.step("\\boxed{%d}" % guess)
        times.append(time.perf_counter() - began)
        seen.append(text)
        if done or truncated:
            break
    return seen, times
seen, _ = play()
began = time.process_time()
times = [one for _ in range(rollouts) for one in play()[1]]
used = time.process_time() - began
usage = resource.getrusage(resource.RUSAGE_SELF)
total = usage.ru_utime + usage.ru_stime
print(json.dumps({"seen": seen, "cpu_s": used, "total_s": total, "rss": usage.ru_maxrss * 1024, "times": times}))
"""
ECHO = r"""
import os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
while data := channel.recv(65536):
    channel.sendall(data)
"""


class CannedInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The texts of a conversation."""

    seen: list[str]


class CannedHandler(AgentHandler[CannedInstance]):
    """The same conversation as the game's, without the game."""

    task = "canned"
    instance_type = CannedInstance

    async def run(self, phase: RunPhase[CannedInstance]) -> PhaseData:
        """Say the texts."""
        first, *others = phase.instance.seen
        talk = phase.conversation([ChatMessage(Role.USER, first)])
        await talk.say()
        for text in others:
            await talk.say(text)
        talk.end()
        return {}

    async def eval(self, phase: EvalPhase[CannedInstance]) -> Evaluation:
        """Find it right."""
        del phase
        return Evaluation(0.0)


def policy(prompt: str) -> str:
    """Guess the next number."""
    turn = prompt.count("<|im_start|>assistant") - 1
    return rf"\boxed{{{GUESSES[turn % len(GUESSES)]}}}"


def bare(python: str, rollouts: int) -> dict[str, Any]:
    """Play GEM in a process of its own."""
    argument = json.dumps([GAME, SEED, GUESSES, rollouts])
    done = subprocess.run([python, "-I", "-c", BARE, argument], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def own_cpu_s() -> float:
    return time.process_time()


def workers_of(handler: EnvironmentHandler) -> list[psutil.Process]:
    """Return the workers of a handler, their guards, and the templates that they are forked from."""
    templates = handler._pool._templates.values() if handler._pool is not None else ()
    guards = [psutil.Process(template.pid) for template in templates]
    return [process for guard in guards for process in (guard, *guard.children(recursive=True))]


def cpu_of(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def played(service: LocalService, task: str, instance: dict[str, Any], rollouts: int, seen: set[Any]) -> None:
    """Play rollouts at once; add how they ended."""
    with service.client() as client:
        for _ in range(rollouts):
            client.submit(Job(task=task, instance=instance))
        seen.update((one.outcome, one.reward, one.turns.shape[0]) for one in client.stream())


def through_the_service(python: str, rollouts: int, processes: int) -> list[Row]:
    """Measure many rollouts at once."""
    alone = bare(python, rollouts)
    handler = EnvironmentHandler()
    handlers = {"environment": handler, "canned": CannedHandler()}
    ends: set[Any] = set()
    with LocalService(handlers=handlers, engine=say(policy), slots=rollouts) as service:
        canned = {"seen": alone["seen"][:-1]}
        for task, instance in (("environment", INSTANCE), ("canned", canned)):
            played(service, task, instance, rollouts, set())  # starts the workers
        began, workers = own_cpu_s(), workers_of(handler)
        played(service, "canned", canned, rollouts, set())
        loop_s = own_cpu_s() - began
        began, before = own_cpu_s(), cpu_of(workers)
        played(service, "environment", INSTANCE, rollouts, ends)
        workers = workers_of(handler)
        worker_s = cpu_of(workers)
        ours_s = own_cpu_s() - began + worker_s - before
        memory = sum(process.memory_full_info().pss for process in workers)  # shared pages are counted once
        start_s = before
    if len(ends) != 1 or next(iter(ends))[0] != Outcome.COMPLETED:
        raise AssertionError(f"the rollouts ended differently: {ends}")
    each = [bare(python, 1) for _ in range(processes)]
    process_s, process_memory = median(one["total_s"] for one in each), median(one["rss"] for one in each)
    per_rollout = (ours_s - loop_s + start_s) / rollouts
    turns = len(alone["seen"]) - 1
    return [
        Row(
            f"{rollouts} GEM rollouts at once, {turns} turns each: CPU per rollout, worker's start included",
            1e3 * per_rollout,
            "ms CPU",
            f"one process per rollout ({1e3 * process_s:,.0f} ms)",
            process_s / per_rollout,
            "at least 20× less",
            process_s / per_rollout >= 20,
        ),
        Row(
            "the same: memory of the workers per rollout",
            memory / rollouts / 1e6,
            "MB",
            f"one process per rollout ({process_memory / 1e6:,.0f} MB)",
            process_memory * rollouts / memory,
            "at least 20× less",
            process_memory * rollouts / memory >= 20,
        ),
        Row(
            "the same, beyond what the agent loop takes",
            1e3 * (ours_s - loop_s) / rollouts,
            "ms CPU",
            f"GEM stepped bare ({1e3 * alone['cpu_s'] / rollouts:,.2f} ms)",
            (ours_s - loop_s) / alone["cpu_s"],
            "at most 1.3×",
            ours_s - loop_s <= 1.3 * alone["cpu_s"],
        ),
    ]


async def steps_of_a_worker(place: EnvironmentPlace, steps: int) -> list[float]:
    """Return how long steps take."""
    pool, times = EnvironmentPool(1), []
    try:
        number = 0
        while len(times) < steps:
            number += 1
            async with pool.rollout(place, str(number)) as world:
                await world.open({"id": GAME}, SEED)
                for guess in GUESSES:
                    began = time.perf_counter()
                    step = await world.step("main", rf"\boxed{{{guess}}}")
                    times.append(time.perf_counter() - began)
                    if step.done:
                        break
                await world.close()
    finally:
        await pool.close()
    return times[:steps]


def round_trips(count: int) -> list[float]:
    """Return how long a text of a step takes over a Unix socket to another Python process and back."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-c", ECHO, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as echo:
        theirs.close()
        times = []
        for _ in range(count + 10):
            began = time.perf_counter()
            ours.sendall(b"x" * 200)
            ours.recv(65536)
            times.append(time.perf_counter() - began)
        ours.close()
        echo.wait()
    return times[10:]


class Echoed(asyncio.Protocol):
    """A call over uvloop's own protocol: a future per call, and no frames."""

    answer: asyncio.Future[bytes]

    def data_received(self, data: bytes) -> None:
        self.answer.set_result(data)


async def round_trips_of_a_loop(count: int) -> list[float]:
    """Return how long the same takes on an event loop."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-I", "-c", ECHO, str(theirs.fileno())]
        echo = subprocess.Popen(command, pass_fds=(theirs.fileno(),))  # noqa: ASYNC220 - before the measurement
    loop, times = asyncio.get_running_loop(), []
    transport, echoed = await loop.create_connection(Echoed, sock=ours)
    for _ in range(count + 10):
        began = time.perf_counter()
        echoed.answer = loop.create_future()
        transport.write(b"x" * 200)
        await echoed.answer
        times.append(time.perf_counter() - began)
    transport.close()
    await asyncio.to_thread(echo.wait)
    return times[10:]


def of_steps(place: EnvironmentPlace, steps: int) -> list[Row]:
    """Measure single steps."""
    ours = quantiles(uvloop.run(steps_of_a_worker(place, steps)))[0]
    call = median(bare(place.python, steps // len(GUESSES))["times"])
    peer = call + median(round_trips(steps))
    on_a_loop = call + median(uvloop.run(round_trips_of_a_loop(steps)))
    return [
        Row(
            f"a step on a worker, p50 of {steps:,}",
            1e6 * ours,
            "µs",
            f"bare call and a round trip of a Unix socket ({1e6 * peer:,.0f} µs)",
            ours / peer,
            "at most 1.5×",
            ours <= 1.5 * peer,
        ),
        Row(
            "the same",
            1e6 * ours,
            "µs",
            f"bare call and a round trip on uvloop, without frames and checks ({1e6 * on_a_loop:,.0f} µs)",
            ours / on_a_loop,
        ),
    ]


def under_kills(kills: int) -> list[Row]:
    """Kill the worker again and again while rollouts play on it."""
    handler = EnvironmentHandler()
    recoveries: list[float] = []
    over = threading.Event()

    def kill() -> None:
        while len(recoveries) < kills:
            while not playing(handler):
                time.sleep(0.01)
            time.sleep(0.2)
            if not (victims := playing(handler)):
                continue
            os.kill(victims[0], signal.SIGKILL)
            began = time.perf_counter()
            while not set(playing(handler)) - set(victims):
                time.sleep(0.005)
            recoveries.append(time.perf_counter() - began)
        over.set()

    ends: Counter[Any] = Counter()
    submitted = 0
    with LocalService(handlers={"environment": handler}, engine=say(policy), slots=16) as service:
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with service.client() as client:
            while not over.is_set():
                for _ in range(32):
                    client.submit(Job(task="environment", instance=INSTANCE, max_attempts=100))
                submitted += 32
                ends.update((one.outcome, one.reward) for one in client.stream())
    right = max(ends.values())
    return [
        Row(
            f"jobs lost while the worker was killed {kills} times, of {submitted:,}",
            submitted - sum(ends.values()),
            "jobs",
            target="0",
            holds=submitted == sum(ends.values()),
        ),
        Row(
            "the same: rewards that differ from an undisturbed rollout's",
            sum(ends.values()) - right,
            "jobs",
            target="0",
            holds=right == sum(ends.values()),
        ),
        Row(
            "the same: from the kill to a worker that plays, p99",
            quantiles(recoveries)[2],
            "s",
            target=f"under {RECOVERY_S:g} s",
            holds=quantiles(recoveries)[2] < RECOVERY_S,
        ),
    ]


def playing(handler: EnvironmentHandler) -> list[int]:
    """Return the processes that play rollouts."""
    pool = handler._pool
    return [worker.pid for worker in [*pool.workers] if worker.rollouts] if pool is not None else []


def measure(quick: bool) -> list[Row]:
    """Measure all."""
    try:
        place = EnvironmentStore().place("gem")
    except EnvironmentFailed as error:
        raise Incomplete(error.message, []) from error
    rollouts, processes = (QUICK_ROLLOUTS, QUICK_PROCESSES) if quick else (ROLLOUTS, PROCESSES)
    rows = through_the_service(place.python, rollouts, processes)
    rows += of_steps(place, QUICK_STEPS if quick else STEPS)
    return rows + under_kills(QUICK_KILLS if quick else KILLS)


if __name__ == "__main__":
    main("environments", "What it costs to play environments in worker processes", measure)
