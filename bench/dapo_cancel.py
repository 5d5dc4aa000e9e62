"""From the end of a batch to free slots, with real sandboxes: for bench/dapo.py.

All slots of RUN but two hold jobs of a batch with a sandbox each; in half of them a tool call runs inside, in the other
half an engine generates at the same time. The other two slots run the group that completes the batch. Jobs of another
client, without sandboxes, wait for the slots. When the two rollouts end, the batch is met, and the others are cancelled
at once. Each of their slots is timed from EVAL's verdict on the second of the two until a waiting job runs there: the
decision, the message to the stage process, the end of the tool call or generation, the end of the sandbox and its
processes, and the message back. Each also waits for the others' ends on this machine's cores.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bell import Bell
from service import BenchService

from prorl_zmq import Job, RolloutClient
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from prorl_zmq import Trajectory

Within = Literal["tool", "generation", "nothing"]

GROUP = 2
LIMIT_S = 60.0


def cancel_s(image: str, slots: int, rounds: int) -> list[float]:
    """Give the seconds from the end of a batch to the next job in each of the slots that it held.

    Args:
        image: a directory image for Apptainer.
        slots: of RUN.
        rounds: batches; each frees `slots - GROUP` slots.
    """
    stages = [("init", 4), ("run", slots), ("eval", 4)]
    with BenchService(stages, sandbox=("apptainer", image)) as service, Bell(service.folder / "bell") as bell:
        engine = str(Path(__file__).with_name("endless_engine.py"))
        service.start_engine(engine, service.backend_broker, f"ipc://{service.folder}/endless", str(bell.path))
        with (
            RolloutClient(service.front_door, timeout_s=LIMIT_S) as trainer,
            RolloutClient(service.front_door, timeout_s=LIMIT_S) as other,
            ThreadPoolExecutor(1) as aside,
        ):
            return [seconds for _ in range(rounds) for seconds in _one_batch(trainer, other, aside, bell, slots)]


def _one_batch(trainer: RolloutClient, other: RolloutClient, aside: Executor, bell: Bell, slots: int) -> list[float]:
    kinds: list[Within] = [("tool", "generation")[number % 2] for number in range(slots // GROUP - 1)]
    with trainer.open_batch(target_groups=1, group_size=GROUP, keep="all", carry="nothing", adopt=False) as batch:
        batch.feed(_job(bell, within) for within in [*kinds, "nothing"])
        first = aside.submit(batch.next_group, LIMIT_S)
        holding = bell.wait(slots)
        behind = other.submit(_job(bell, "nothing") for _ in range(slots))
        until = time.monotonic() + LIMIT_S
        while other.status().queued.get(Phase.RUN, 0) < slots:
            if time.monotonic() > until:
                raise RuntimeError("the jobs behind did not come to wait for RUN")
            other.collect(1, wait_s=0.02)
        for note in holding:
            if note.what == "nothing":
                bell.let_go(note.job_id)
        group = first.result()
    assert group is not None
    judged = max(trajectory.result.metrics["judged"] for trajectory in group.trajectories)
    taken = sorted(note.at - judged for note in bell.wait(slots))
    for note in holding:
        if note.what != "nothing":
            bell.wait_end(note.job_id)
    for job_id in behind:
        bell.let_go(job_id)
    ended: list[Trajectory] = list(islice(other.stream(timeout_s=LIMIT_S), slots))
    assert sum(trajectory.reward == 1.0 for trajectory in ended) == slots
    return taken[GROUP:]  # the first took the slots of the kept group


def _job(bell: Bell, within: Within) -> Job:
    return Job(task="hold", instance={"bell": str(bell.path), "within": within})
