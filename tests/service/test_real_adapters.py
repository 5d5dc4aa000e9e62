"""Two adapters of a service that has the transformers engine, against peft's own forward pass."""

from __future__ import annotations

import json
import os
import shutil
import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace
from support.adapters import PeftReference, peft_adapter
from support.services import PROCESS, serving
from support.waiting import until

from prorl_zmq import Job, Sampling
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.wire.messages.jobs import EpisodeLimits

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq import RolloutClient, Trajectory

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(find_spec("peft") is None, reason="it is of the extra [train]"),
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("transformers"),
]
JOBS = 4
CLOSE = 1e-4


def job(model: str, number: int) -> Job:
    return Job(
        task="math",
        instance={"problem": f"What is {number} + 1?", "ground_truth": "7"},
        model=model,
        sampling=Sampling(max_tokens=12, seed=number),
        episode=EpisodeLimits(max_turns=1),
        backend_wait_s=120.0,
    )


def rollouts(client: RolloutClient, model: str) -> list[Trajectory]:
    client.submit([job(model, number) for number in range(JOBS)])
    done = list(client.stream(timeout_s=120))
    assert [one.outcome for one in done] == ["completed"] * JOBS, [one.error for one in done]
    return done


def test_each_trainers_rollouts_are_of_its_own_adapter_and_version_also_after_a_kill(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make(base, 0)
    adapters = {
        name: peft_adapter(base, tmp_path / name, seed) for seed, name in enumerate(["a-1", "a-2", "b-5"], start=1)
    }
    reference = PeftReference(base)
    backend = f'[[backends]]\nkind = "transformers"\nname = "base"\nmodel = {json.dumps(str(base))}\nfrozen = true\n'
    with serving(f"{PROCESS}{backend}lora = {{ slots = 2, rank = 8 }}\n") as service:
        service.wait_ready()
        with service.client() as first, service.client() as second:
            until(lambda: len(first.backends.list()) == 1, "the engine", 120)
            first.update_weights(adapters["a-1"], 1, model="a", timeout_s=60)
            second.update_weights(adapters["b-5"], 5, model="b", timeout_s=60)
            found = {"a-1": rollouts(first, "a"), "b-5": rollouts(second, "b")}
            published = shutil.copytree(adapters["a-2"], tmp_path / "published")
            first.update_weights(published, 2, model="a", timeout_s=60)
            shutil.rmtree(published)
            os.kill(service.child("engine"), signal.SIGKILL)
            found["a-2"] = rollouts(first, "a")
            texts = found["b-5"]
            for name in ("a-2", "b-5"):
                model, version = name.split("-")
                for text, one in zip(texts, first.score(texts, model=model, top=2), strict=True):
                    exact = reference.logprobs(adapters[name], [text.token_ids.tolist()], len(text.token_ids) - 1)[0]
                    assert np.abs(one.logprobs[1:] - exact).max() < CLOSE
                    assert one.weight_version == int(version)
            first.submit([replace(job("a", number), teacher="b:2") for number in range(JOBS)])
            for one in first.stream(timeout_s=120):
                rows = one.records.rows("teacher")
                exact = reference.logprobs(adapters["b-5"], [one.token_ids.tolist()], len(one.token_ids) - 1)[0]
                assert np.abs(one.records["teacher_logprobs"] - exact[rows - 1]).max() < CLOSE
                assert one.result.metrics["teacher_weight_version"] == 5
            for name, done in found.items():
                model, version = name.split("-")
                assert {(one.result.model, one.versions) for one in done} == {(model, (int(version),))}
                assert reference.gap(adapters[name], done) < CLOSE
                assert all(reference.gap(adapters[other], done) > 0.1 for other in adapters if other != name)
