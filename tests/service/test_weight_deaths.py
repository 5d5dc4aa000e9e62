"""Trainer, engine hosts and backend broker are killed while weights are published as deltas, one after the other."""

from __future__ import annotations

import random
import signal
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import forks
from support.services import Program
from support.weight_versions import model, write_checkpoint

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

DEATHS = 200
NEXT_S = 60.0
HERE = Path(__file__).parent
STAGES = ("begun", "written", "served")
HOSTS = ("a", "b")


class Cluster:
    """Brokers, two engine hosts that share a copy, and a trainer; each may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "trainer.log"
        self.log.touch()
        write_checkpoint(folder / "served", model(99))
        self._run_dir = folder / "run"
        self.rollout_broker = Program("prorl", "broker", "rollout", "--run-dir", self._run_dir)
        self.broker = self._broker()
        self.hosts = {name: self._host(name) for name in HOSTS}
        self.trainer = self._trainer()

    def kill(self, victim: str) -> None:
        match victim:
            case "trainer":
                killed(self.trainer)
                self.trainer = self._trainer()
            case "broker":
                self.broker.end(signal.SIGKILL)
                self.broker = self._broker()
            case _:
                killed(self.hosts[victim])
                self.hosts[victim] = self._host(victim)

    def lines(self, stage: str) -> list[list[str]]:
        """Return the words of the lines that the trainer noted at a stage."""
        return [line.split() for line in self.log.read_text().splitlines() if line.startswith(stage)]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + NEXT_S
        while not condition():
            assert time.monotonic() < until, f"waited {NEXT_S:g} s for {what}:\n{self.log.read_text()[-2000:]}"
            threading.Event().wait(0.01)

    def close(self) -> None:
        for process in (self.trainer, *self.hosts.values()):
            killed(process)
        with ExitStack() as stack:
            stack.callback(self.rollout_broker.close)
            stack.callback(self.broker.close)

    def _broker(self) -> Program:
        return Program("prorl", "broker", "backend", "--run-dir", self._run_dir)

    def _host(self, name: str) -> subprocess.Popen[str]:
        return forks.start(
            str(HERE / "noting_engine.py"), f"ipc://{self._run_dir}/backend_broker", str(self.folder), name
        )

    def _trainer(self) -> subprocess.Popen[str]:
        return forks.start(str(HERE / "delta_trainer.py"), f"ipc://{self._run_dir}/front_door", str(self.folder))


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_engines_serve_only_published_weights_whatever_dies() -> None:
    chance = random.Random(39)
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name, ExitStack() as stack:
        folder = Path(name)
        cluster = Cluster(folder)
        stack.callback(cluster.close)
        cluster.until(lambda: bool(cluster.lines("served")), "the first version")
        for death in range(DEATHS):
            victim = ("trainer", "a", "broker", "b")[death % 4]
            stage = STAGES[chance.randrange(3)]
            there = len(cluster.lines(stage))
            cluster.until(lambda stage=stage, there=there: len(cluster.lines(stage)) > there, stage)  # type: ignore[misc]
            threading.Event().wait(chance.uniform(0, 0.03))
            newest = int(cluster.lines("begun")[-1][1])
            cluster.kill(victim)
            cluster.until(
                lambda newest=newest: int(cluster.lines("served")[-1][1]) > newest,  # type: ignore[misc]
                f"a version after {newest}, which was begun when {victim} died",
            )
        last = int(cluster.lines("served")[-1][1])
        for name_ in HOSTS:
            log = folder / f"{name_}.log"
            cluster.until(lambda log=log: int(log.read_text().split()[-2]) >= last, f"{log.name} to serve {last}")  # type: ignore[misc]
        published = {int(words[1]): words[2] for words in cluster.lines("begun")}
        for name_ in HOSTS:
            served = [line.split() for line in (folder / f"{name_}.log").read_text().splitlines()]
            assert len(served) > DEATHS / 4
            assert [line for line in served if published[int(line[0])] != line[1]] == []
        versions = [*(folder / "published").glob("weight_v*")]
        assert len(versions) < 64, "old versions are deleted"
