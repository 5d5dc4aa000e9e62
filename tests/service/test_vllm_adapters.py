"""Two trainers of two adapters on one real vLLM, through a whole service, against peft's own forward pass."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from support.adapters import PeftReference, peft_adapter
from support.services import PROCESS, serving
from support.waiting import until
from vllm_python import START_LIMIT_S, environment, vllm_python
from vllm_server import SMALL

from prorl_zmq import Job, Sampling
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.wire.messages.jobs import EpisodeLimits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_zmq import RolloutClient, Trajectory

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("peft") is None, reason="it is of the extra [train]"),
    pytest.mark.timeout(START_LIMIT_S + 180),
]
JOBS = 4
LONG = 400
"""Tokens of a rollout that an update meets."""
CLOSE = 1e-4
APART = 0.5
"""Least that some log-prob of the rollouts differs from that of another adapter."""
ENGINE = """
[[backends]]
name = "base"
frozen = true
kind = "vllm"
model = {model}
python = {python}
arguments = {arguments}
lora = {{ slots = 2, rank = 8 }}
"""


def submit(client: RolloutClient, model: str, tokens: int) -> None:
    client.submit(
        Job(
            task="math",
            instance={"problem": f"What is {number} + 1?", "ground_truth": "7"},
            model=model,
            sampling=Sampling(max_tokens=tokens),
            episode=EpisodeLimits(max_turns=1),
            backend_wait_s=120.0,
        )
        for number in range(JOBS)
    )


def ended(client: RolloutClient, before: Sequence[Trajectory] = ()) -> list[Trajectory]:
    done = [*before, *client.stream(timeout_s=120)]
    assert [one.outcome for one in done] == ["completed"] * JOBS, [one.error for one in done]
    return done


def test_an_update_of_one_adapter_while_rollouts_of_both_run(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make(base)
    adapters = {name: peft_adapter(base, tmp_path / name, seed) for seed, name in enumerate(["a-1", "a-2", "b-1"])}
    words = {"model": str(base), "python": vllm_python(), "arguments": list(SMALL)}
    topology = PROCESS + ENGINE.format_map({name: json.dumps(value) for name, value in words.items()})
    packages = environment(tmp_path)["PYTHONPATH"]
    with (
        serving(topology, start_s=START_LIMIT_S, PYTHONPATH=packages) as service,
        service.client() as first,
        service.client() as second,
    ):
        first.update_weights(adapters["a-1"], 1, model="a", timeout_s=60)
        second.update_weights(adapters["b-1"], 1, model="b", timeout_s=60)
        submit(first, "a", LONG)
        submit(second, "b", LONG)
        until(lambda: sum(one.load.running for one in first.backends.list() if one.load) > JOBS, "rollouts of both")
        published = shutil.copytree(adapters["a-2"], tmp_path / "published")
        first.update_weights(published, 2, model="a", timeout_s=60)
        shutil.rmtree(published)
        early = [client.collect(JOBS, wait_s=0) for client in (first, second)]
        assert all(len(done) < JOBS for done in early), "rollouts of both still run after the update"
        found = {"a-1": ended(first, early[0]), "b-1": ended(second, early[1])}
        submit(first, "a", 32)
        found["a-2"] = ended(first)
    reference = PeftReference(base)
    for name, done in found.items():
        model, version = name.split("-")
        assert {(one.result.model, one.versions) for one in done} == {(model, (int(version),))}
        assert reference.gap(adapters[name], done) < CLOSE
        assert all(reference.gap(adapters[other], done) > APART for other in adapters if other != name)
