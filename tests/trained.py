"""What tests of trainers share: tiny models that can learn `letters`, a service that serves one, and what must hold."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import letters
import psutil
import pytest
from command_lines import line_of

from prorl_zmq import Job, RolloutClient
from prorl_zmq.data.reward_curve import CLEAR, rise
from prorl_zmq.errors import RequestTimeout
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.inference.checkpoint import delta_of
from prorl_zmq.service.child import ChildService

if TYPE_CHECKING:
    from collections.abc import Iterator

JOBS = [Job(task="letters", instance={"name": f"n{number}"}) for number in range(64)]
SMALL_STEP = 3e-10
"""A learning rate that changes a tenth of the elements of float32 weights."""
CALLING = [Job(task=job.task, instance={**job.instance, "has_tool": True}) for job in JOBS]
"""The same for the model `calls`."""


@contextmanager
def models() -> Iterator[Path]:
    """Give a folder with the models `plain` and `calls`, whose rollouts have several segments."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, pytest.MonkeyPatch.context() as patch:
        package = Path(folder, "package")
        package.mkdir()
        letters.register(package, patch)
        for name in ("plain", "calls"):
            make(Path(folder, name))
            letters.lean(Path(folder, name), to_calls=name == "calls")
        yield Path(folder)


@contextmanager
def service_of(model: Path, slots: int = 8, engine: str = 'kind = "transformers"') -> Iterator[ChildService]:
    """Serve a model; `engine` is what its table in the topology begins with."""
    stages = "".join(f'[[stage]]\nrole = "{role}"\nslots = {slots}\n' for role in ("init", "run", "eval"))
    topology = f'sandbox = {{kind = "process"}}\nbackends = [{{{engine}, model = "{model}"}}]\n{stages}'
    with (
        tempfile.TemporaryDirectory(prefix="prorl-t-") as folder,
        ChildService(Path(folder), topology) as service,
        RolloutClient(service.front_door, timeout_s=90) as client,
    ):
        try:
            service.wait_ready(client)
        except RequestTimeout:  # a real vLLM may take twice as long
            service.wait_ready(client)
        yield service


def kill(service: ChildService, word: str) -> None:
    """Kill the service's process whose command line has the word; its supervisor starts it again."""
    children = psutil.Process(service.pid).children(recursive=True)
    found = [child for child in children if word in line_of(child)]
    assert found, (word, [line_of(child) for child in children])
    found[0].kill()


def check_rise(rewards: list[float]) -> None:
    """The mean of the last third is above that of the first by more than two standard errors."""
    found = rise(rewards)
    assert found is not None
    assert found.errors > CLEAR, rewards


def check_deltas(weights: Path, newest: int) -> None:
    """The newest version of a training has a delta to the one before."""
    assert delta_of(weights / f"weight_v{newest:06d}") is not None, sorted(weights.iterdir())
