"""Draws the pictures of the dashboard into docs/dashboard/: `python bench/watching_pictures.py`.

A real service works meanwhile: rollouts with tools on the demo's questions, some of which fail, a half-collected batch,
and two evaluations of engines that differ in skill. It takes about two minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np
from service import free_port
from watching_page import WAIT_MS, chromium

from prorl_zmq import Job, PhaseLimits, RolloutClient
from prorl_zmq.demo.tasks import QUESTIONS, make_instance
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.watching import ROWS_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Page

    from prorl_zmq import Group

OUT = Path(__file__).parent.parent / "docs" / "dashboard"
PRORL = (sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl")
ENGINE = (sys.executable, str(Path(__file__).with_name("watching_engine.py")))
SKILLS, STEPS, LEARN_S = (0.3, 0.45, 0.6, 0.7, 0.8), 4, 1.5
"""Of the engines of a training, steps with each, and how long the trainer learns in each step."""
SIZES = {"wide": (1280, 800), "narrow": (390, 800)}
TOPOLOGY = """
backends = []
[service]
node = "gpu-1"
[dashboard]
bind = "127.0.0.1:{port}"
runs = "{runs}"
[[stage]]
role = "init"
slots = 12
[[stage]]
role = "run"
slots = 12
[[stage]]
role = "eval"
slots = 6
"""


@contextmanager
def running(command: Sequence[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


class Scene:
    """A service in a folder of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.front_door = f"ipc://{self.run_dir}/front_door"
        config, self._log = folder / "topology.toml", folder / "log"
        config.write_text(TOPOLOGY.format(port=free_port(), runs=folder / "runs"))
        (folder / "runs").mkdir()
        flags = ("--sandbox", "process", "--config", str(config), "--run-dir", str(self.run_dir))
        log = stack.enter_context(self._log.open("wb"))
        stack.enter_context(running([*PRORL, "serve", *flags], stderr=log))
        with RolloutClient(self.front_door, timeout_s=60) as client:
            while len(client.status().stages) < 3:
                client.collect(1, wait_s=0.1)

    def address(self) -> str:
        return re.findall(r"open (http\S+)", self._log.read_text())[-1]

    @contextmanager
    def engine(self, name: str, skill: float, turn_s: float) -> Iterator[None]:
        place = (f"ipc://{self.run_dir}/backend_broker", f"ipc://{self.run_dir}/{name}")
        with running([*ENGINE, *place, name, str(skill), str(turn_s)]):
            yield

    def evaluate(self, name: str, skill: float) -> None:
        data = self.folder / "questions.jsonl"
        random = np.random.default_rng(7)
        questions = [{"task": "shell", "instance": make_instance(question, random)} for question in [*QUESTIONS] * 6]
        data.write_text("".join(json.dumps(line) + "\n" for line in questions))
        out = ("--out", str(self.folder / "runs" / name), "--samples", "4", "--k", "1,2,4")
        with self.engine(f"engine-{name}", skill, 0.05):
            subprocess.run([*PRORL, "eval", str(data), "--connect", self.front_door, *out], check=True, timeout=180)


def prompts(count: int, name: str, **more: Any) -> Iterator[Job]:
    random = np.random.default_rng(3)
    names = [*QUESTIONS]
    for number in range(count):
        instance = make_instance(names[number % len(names)], random)
        yield Job(task="shell", instance=instance, job_id=f"{name}-{number:03}", **more)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    with ExitStack() as stack:
        scene = Scene(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-"))), stack)
        page = stack.enter_context(chromium())
        page.goto(scene.address())
        page.locator("#state.is-live").wait_for(timeout=WAIT_MS)
        scene.evaluate("step-0", 0.45)
        scene.evaluate("step-200", 0.75)
        client = stack.enter_context(RolloutClient(scene.front_door, session="grpo", timeout_s=60))
        version = learn(scene, client)
        names = [f"engine-{number}" for number in range(2)]
        for name in names:
            stack.enter_context(scene.engine(name, 0.6, 0.5))
        say_version(client, names, version)
        short = PhaseLimits(run_s=0.8)
        client.submit([*prompts(90, "warm-up"), *prompts(8, "too-late", limits=short)])
        long = {"instruction": "Count: " + "1 " * 40_000, "check": "false"}  # the engine's context cannot hold it
        client.submit(Job(task="shell", instance=long, job_id=f"too-long-{number}") for number in range(4))
        opened = list(client.stream(timeout_s=120))
        best = max(opened, key=lambda each: (each.reward or 0.0, len(each.turns), each.job_id))
        batch = stack.enter_context(client.open_batch(64, 8, batch_id="step-201"))
        batch.feed(prompts(400, "question"))
        training = threading.Thread(target=train, args=(iter(batch),))
        training.start()
        time.sleep(10)
        shoot(page, best.job_id, client)
        training.join()


def learn(scene: Scene, client: RolloutClient) -> int:
    """Make the steps of a training whose engines get better, each while the next batch is rolled out."""
    version = 0
    for skill in SKILLS:
        name = f"engine-{skill:g}"
        with scene.engine(name, skill, 0.1):
            say_version(client, [name], version)
            ready: Queue[int] = Queue(maxsize=1)
            collector = threading.Thread(target=collect, args=(scene, version, ready))
            collector.start()
            for _ in range(STEPS):
                ready.get()
                time.sleep(LEARN_S)
                version += 1
                client.set_weight_version(version)
            collector.join()
    return version


def collect(scene: Scene, first: int, ready: Queue[int]) -> None:
    """Collect batches, one ahead of the trainer."""
    with RolloutClient(scene.front_door, session="grpo", timeout_s=60) as client:
        for step in range(first, first + STEPS):
            with client.open_batch(4, 4, keep="all", batch_id=f"step-{step}") as batch:
                batch.feed(prompts(4, f"lesson-{step}"))
                count = len(list(batch))
            ready.put(count)


def say_version(client: RolloutClient, names: list[str], version: int) -> None:
    """Wait for engines, and say which weights they have."""
    while not {each.backend.backend_id for each in client.backends.list()} >= {*names}:
        time.sleep(0.1)
    client.set_weight_version(version)


def train(groups: Iterator[Group]) -> None:
    """Take groups at the pace of a trainer, while pictures are drawn."""
    for _ in zip(range(24), groups, strict=False):
        time.sleep(2)


def running_job(client: RolloutClient) -> str:
    """Return a job that has come to RUN not long ago."""
    rows = client.views.changes("", 0, 0, ROWS_LIMIT).jobs
    running = [row for row in rows if (row.phase, row.place) == (Phase.RUN, "held")]
    return sorted(running, key=lambda row: row.entered_at)[-4:][0].job_id


def shoot(page: Page, job_id: str, client: RolloutClient) -> None:
    views = {
        "overview": "#/",
        "jobs": "#/jobs?sort=state",
        "job": f"#/jobs/{job_id}",
        "running": "",
        "batch": "#/batches/step-201",
        "training": "#/training",
        "runs": "#/runs?run=step-0&run=step-200",
    }
    for scheme, size in (("light", "wide"), ("dark", "wide"), ("light", "narrow")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(dict(zip(("width", "height"), SIZES[size], strict=True)))
        for name, view in views.items():
            place = view or f"#/jobs/{running_job(client)}"
            page.evaluate("(place) => { location.hash = place; }", place)
            page.locator("main .card, main .virtual-scroll").first.wait_for(timeout=WAIT_MS)
            if name == "runs":
                page.get_by_role("heading", name="Problems that changed").wait_for(timeout=WAIT_MS)
            time.sleep(1.5)  # a view asks for what it shows, and is drawn again once a second
            file = OUT / f"{name}-{size if size == 'narrow' else scheme}.png"
            page.screenshot(path=file, full_page=name in ("runs", "training"))


if __name__ == "__main__":
    os.environ.pop("PRORL_KEYS", None)
    main()
