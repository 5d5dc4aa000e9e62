"""The worker pool of `verifiers`, with one worker killed: `python verifiers_pool.py JOBS RUN_S WORKERS SILENCE_S`.

It starts the pool as its own launcher does, submits all jobs at once, has one of the workers killed when a quarter of
the jobs has ended, waits until none has ended for `SILENCE_S`, and prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.serve import EnvClient, env_config_data, serve_env
from verifiers.v1.types import SamplingConfig

CONFIG = {
    "taskset": {"id": "verifiers_sleep"},
    "agent": {"harness": {"id": "verifiers_sleep"}, "runtime": {"type": "subprocess"}},
}


def workers(broker: int, count: int) -> list[int]:
    """Give the pool's workers: those of the broker's children that are not multiprocessing's own helper."""
    found = []
    for task in Path(f"/proc/{broker}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    found = [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == count, found
    return found


async def measure(broker: int, address: str, jobs: int, run_s: float, count: int, silence_s: float) -> dict[str, float]:
    """Run the jobs, and say what became of them."""
    client = EnvClient(address)
    await client.wait_for_server_startup()
    model = EvalClientConfig(base_url="http://127.0.0.1:9", api_key_var="NO_KEY")
    ended: list[bool] = []
    last = time.monotonic()

    async def one(number: int) -> None:
        nonlocal last
        try:
            episode = await client.run(model, "none", SamplingConfig(), {"idx": number, "prompt": "", "run_s": run_s})
            ended.append(episode.ok and not episode.errors)
        except RuntimeError:
            ended.append(False)
        last = time.monotonic()

    await asyncio.gather(*(one(-1 - number) for number in range(8 * count)))  # until each worker is up
    ended.clear()
    begun = time.monotonic()
    tasks = [asyncio.create_task(one(number)) for number in range(jobs)]
    killed = False
    while len(ended) < jobs and time.monotonic() - last < silence_s:
        await asyncio.sleep(0.01)
        if not killed and len(ended) >= jobs // 4:
            os.kill(workers(broker, count)[0], signal.SIGKILL)
            killed = True
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    return {"completed": sum(ended), "failed": len(ended) - sum(ended), "seconds": last - begun}


def main() -> None:
    jobs, run_s, count, silence_s = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    spawn = multiprocessing.get_context("spawn")
    addresses = spawn.Queue()
    config = env_config_data(SingleAgentEnvConfig.model_validate(CONFIG))
    options: dict[str, Any] = {
        "max_workers": count,
        "elastic": False,
        "address": "tcp://127.0.0.1:*",
        "max_concurrent": 1,
    }
    ours, death_pipe = spawn.Pipe()  # the pool ends when this end is closed, however this process ends
    options |= {"address_queue": addresses, "config_data": config, "death_pipe": death_pipe}
    pool = spawn.Process(target=serve_env, kwargs=options)
    pool.start()
    death_pipe.close()
    try:
        address = addresses.get(timeout=60)
        print(json.dumps(asyncio.run(measure(pool.pid or 0, address, jobs, run_s, count, silence_s))))
    finally:
        ours.close()
        pool.join(20)
        if pool.is_alive():
            pool.kill()


if __name__ == "__main__":
    main()
