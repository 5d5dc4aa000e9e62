"""The trainers' adapters with a model of their own, records and a teacher, through a whole service."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import slime_types
from recording_engine import RecordingEngine
from support.distillation import distillation_arguments
from teachers import teacher_policy

from prorl_zmq import Job, Sampling
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.integrations import slime
from prorl_zmq.integrations.recorded import Asked
from prorl_zmq.integrations.skyrl import Generator, TrajectoryID
from prorl_zmq.testing import LocalService, say

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("transformers")
INSTANCE = {"problem": "1 + 1?", "ground_truth": "2"}
SAMPLING = Sampling(max_tokens=12, top_k=8)


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    models = {"b": RecordingEngine(), "teacher": EmbeddedEngine(teacher_policy(), 5)}
    with LocalService(engine=say("This is not the model that is asked for."), models=models) as started:
        yield started


def make_job(*_: Any) -> Job:
    return Job(task="math", instance=INSTANCE, sampling=SAMPLING)


def test_skyrls_generator_rolls_out_its_model_with_records(service: LocalService) -> None:
    asked = Asked("b", ("experts", "sampling_mask"))
    generator = Generator(make_job, connect=service.client, asked=asked)
    ids = [TrajectoryID("a", place) for place in range(2)]
    prompts = {"prompts": ["?"] * 2, "env_classes": [""] * 2, "trajectory_ids": ids}
    output = asyncio.run(generator.generate(prompts))
    for prompt, response, experts, kept in zip(
        output["prompt_token_ids"],
        output["response_ids"],
        output["rollout_expert_indices"],
        output["rollout_sample_support"],
        strict=True,
    ):
        assert len(experts) == len(prompt) + len(response) - 1
        assert kept.shape == (len(response), SAMPLING.top_k)


def test_slimes_samples_have_their_records(service: LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    slime_types.install(monkeypatch)
    monkeypatch.setattr(slime_types, "Sample", slime_types.RecordingSample)
    args = SimpleNamespace(
        n_samples_per_prompt=2,
        rollout_batch_size=1,
        prorl_endpoint=service.front_door,
        prorl_model="b",
        prorl_record=["experts", "sampling_mask"],
        prorl_teacher="teacher",
        rollout_top_k=8,
        rollout_max_response_len=12,
    )
    source = slime_types.DataSource(2, [{"task": "math", "instance": INSTANCE}])
    try:
        output = slime.generate_rollout(args, 0, source)
    finally:
        slime.close()
    for sample in output.samples[0]:
        layers, chosen = sample.rollout_routed_experts.shape[1:]
        slime_types.check_records(sample, layers, chosen)


def test_trls_distillation_gets_its_teachers_scores(service: LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="of the extra [trl]")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from prorl_zmq.integrations.trl import DistillationWorker

    args = distillation_arguments(2, 64, 4)
    rows = [{"task": "math", "instance": INSTANCE}]
    worker = DistillationWorker(rows, args, model="b", connect=service.client)
    worker.start()
    try:
        samples = [worker.rollout_buffer.get(timeout=60) for _ in range(2)]
    finally:
        worker.stop()
    for sample in samples:
        trained = sample.completion_mask.astype(bool)
        assert sample.teacher_topk_ids.shape == (len(sample.input_ids), 5)
        assert (sample.teacher_topk_ids[~trained] == -1).all()
        assert (sample.teacher_topk_ids[trained] == sample.input_ids[trained, None]).any(axis=1).all()
        assert np.isfinite(sample.teacher_topk_logprobs[trained, :4]).all()
        assert sample.teacher_id == "teacher"
    assert samples[0].prompt_id != samples[1].prompt_id
