"""A trainer gives two real vLLMs its weights by vLLM's own weight transfer; engines and the trainer die within one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zmq
from support.services import Program
from support.waiting import until
from vllm_python import START_LIMIT_S, tiny_models, transfer_environment, vllm_python
from vllm_server import ON_CPU, SMALL

from prorl_zmq import RolloutClient, Sampling
from prorl_zmq.inference.client import EngineClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.inference.engine import Generation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3 * START_LIMIT_S)]

HERE = Path(__file__).parent
NAMES = ("a", "b")
END_S = 120.0


class Cluster:
    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.models = tiny_models(folder, 2)
        self._folder, self._running = folder, running
        self._environment = {**transfer_environment(folder), **ON_CPU, "PRORL_RUN_DIR": str(folder / "run")}
        self._environment.pop("VLLM_CPU_OMP_THREADS_BIND")
        for broker in ("rollout", "backend"):
            running.callback(Program("prorl", "broker", broker, "--run-dir", folder / "run").close)
        self.client = running.enter_context(RolloutClient(f"ipc://{folder}/run/front_door", timeout_s=60))
        self.hosts = {name: self._host(name) for name in NAMES}
        self.trainer = self.new_trainer()

    def new_trainer(self) -> subprocess.Popen[str]:
        command = [str(HERE / "group_trainer.py"), f"ipc://{self._folder}/run/front_door", str(self.models[0])]
        return self._started(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, *words: object) -> None:
        assert self.trainer.stdin is not None
        self.trainer.stdin.write(" ".join(map(str, words)) + "\n")
        self.trainer.stdin.flush()

    def heard(self) -> str:
        assert self.trainer.stdout is not None
        return self.trainer.stdout.readline().strip()

    def versions(self) -> dict[str, int]:
        return {one.backend.backend_id: one.backend.weight_version for one in self.client.backends.list()}

    def sample(self, name: str) -> Generation:
        """Give the likeliest tokens of one engine."""
        (backend,) = [one.backend for one in self.client.backends.list() if one.backend.backend_id == name]

        async def ask() -> Generation:
            with zmq.Context() as context:
                client = EngineClient(context)
                try:
                    asked = np.arange(10, 60, dtype=np.int32), Sampling(temperature=0.0, max_tokens=8)
                    return await client.generate(backend, "job", *asked, (), 60.0)
                finally:
                    client.close()

        return asyncio.run(ask())

    def _host(self, name: str) -> subprocess.Popen[str]:
        options = ["--engine", "vllm", "--model", str(self.models[0]), "--name", name]
        transfer = ["--weight-transfer-config", '{"backend": "socket"}']
        return self._started("-P", "-m", "prorl_zmq.cli", "prorl-engine", *options, "--", *SMALL, *transfer)

    def _started(
        self, *arguments: str, stdin: int = subprocess.DEVNULL, stdout: int | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [vllm_python(), *arguments], env=self._environment, stdin=stdin, stdout=stdout, text=True
        )
        self._running.enter_context(process)
        self._running.callback(process.kill)
        return process


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, ExitStack() as running:
        cluster = Cluster(Path(folder), running)
        until(lambda: cluster.versions().keys() == {*NAMES}, "two engines", START_LIMIT_S)
        yield cluster


def test_engines_take_weights_from_a_group_that_is_made_for_each_update(cluster: Cluster) -> None:
    one, two = cluster.models
    samples = [cluster.sample("a")]
    for version, model in enumerate((two, one, two), 1):
        cluster.say(version, model, 60)
        assert cluster.heard() == f"served {version}"
        assert cluster.versions() == dict.fromkeys(NAMES, version)
        samples.append(cluster.sample("a"))
        assert samples[-1].spans[0].weight_version == version
        assert cluster.sample("b").logprobs.tolist() == samples[-1].logprobs.tolist()
    assert samples[0].logprobs.tolist() == samples[2].logprobs.tolist()
    assert samples[1].logprobs.tolist() == samples[3].logprobs.tolist() != samples[0].logprobs.tolist()

    cluster.say(4, one, END_S, 1)
    assert cluster.heard() == "chunk"
    cluster.hosts["b"].kill()
    cluster.say("continue")
    assert cluster.heard() == "served 4"
    assert cluster.versions() == {"a": 4}
    assert cluster.sample("a").logprobs.tolist() == samples[0].logprobs.tolist()

    cluster.say(5, two, 10, 2)
    assert cluster.heard() == "chunk"
    cluster.trainer.send_signal(signal.SIGKILL)
    assert cluster.hosts["a"].wait(END_S) != 0, "weights of two versions are never served"
    until(lambda: cluster.versions() == {}, "the end of the engine", END_S)
