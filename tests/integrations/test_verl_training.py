"""verl's V1 trainer, in an environment of its own, trains a tiny model through a whole service."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from framework_python import framework_python
from verl_runs import EXAMPLE, OURS, VerlRun
from vllm_python import environment

from prorl_zmq import Job
from prorl_zmq.examples.trainers.shared.make_model import make

torch = pytest.importorskip("torch", reason="it is of the extra [train]")
from safetensors.torch import load_file  # noqa: E402
from trained import CALLING, JOBS, SMALL_STEP, check_deltas, check_rise, kill, models, service_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prorl_zmq.service.child import ChildService

    NewRun = Callable[[ChildService, Path], VerlRun]

pytestmark = [pytest.mark.proof, pytest.mark.timeout(400), pytest.mark.xdist_group("verl")]

STEPS = 18
ON_POLICY = {"trainer__v1__prorl__num_warmup_batches": 0}
SHORT = {"data__max_response_length": 16}
SEGMENTS = {
    "data__max_response_length": 256,
    "actor_rollout_ref__rollout__multi_turn__max_assistant_turns": 3,
    "+trainer__v1__prorl__turn_tokens": 48,  # one rollout in five has several segments before it learns to say much
}
TOO_LONG = {
    "data__max_prompt_length": 24,  # prompts have 23 or 24 tokens; the limit is of both together
    "data__max_response_length": 16,
    "+trainer__v1__prorl__make_job": "verl_on_cpu.long_job",
}
SAVED = {"trainer__save_freq": 1, "actor_rollout_ref__actor__checkpoint__save_contents": "[model]"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with models() as folder:
        yield folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[ChildService]:
    with service_of(folder / "plain") as service:
        yield service


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[NewRun]:
    runs = []

    def make(service: ChildService, model: Path) -> VerlRun:
        runs.append(VerlRun(service, model, tmp_path))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def finish(run: VerlRun, process: subprocess.Popen[str]) -> list[dict[str, float]]:
    run.wait(process)
    return run.steps()


def check_exact(steps: list[dict[str, float]]) -> None:
    """All rollouts are of the newest weights, and the engine's log-probs those of the trainer."""
    for step in steps:
        assert math.isfinite(step["actor/loss"])
        for end in ("max", "min"):
            assert step[f"rollout_corr/rollout_is_{end}"] == pytest.approx(1, abs=1e-4)


def test_verl_trains_on_several_segments(new_run: NewRun, folder: Path, tmp_path: Path) -> None:
    with service_of(folder / "calls") as service:
        run = new_run(service, folder / "calls")
        saved = {**SAVED, "trainer__default_local_dir": tmp_path / "saved"}
        steps = finish(run, run.start(CALLING, STEPS, **ON_POLICY, **SEGMENTS, **saved))
    assert len(steps) == STEPS
    check_exact(steps)
    means = [step["critic/score/mean"] for step in steps]
    check_rise(means)
    lines = re.findall(r"step (\d+): reward (\d\.\d+) ± 0\.\d+ \(\d+ rollouts\)", run.log.read_text())
    assert [(int(step), float(mean)) for step, mean in lines] == [
        (step, pytest.approx(mean, abs=1e-3)) for step, mean in enumerate(means, 1)
    ]
    assert "reward rose from 0." in run.log.read_text()
    assert max(step["rollouts/rows_total"] for step in steps) > 32, "some rollouts have several segments"
    before = load_file(folder / "calls" / "model.safetensors")
    for step in range(STEPS + 1):
        pushed = load_file(tmp_path / "weights" / f"weights-{step:08d}" / "model-00000.safetensors")
        ours = before
        if step:
            shard = tmp_path / "saved" / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt"
            whole = torch.load(shard, weights_only=False)
            ours = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in whole.items()}
            assert all(not torch.equal(pushed[name], before[name]) for name in before), "all tensors change"
        assert all(torch.equal(pushed[name], ours[name]) for name in before)


def test_verl_trains_with_deltas(new_run: NewRun, service: ChildService, folder: Path, tmp_path: Path) -> None:
    run = new_run(service, folder / "plain")
    changed = {f"+{OURS}.form": "delta", "actor_rollout_ref__actor__optim__lr": SMALL_STEP}
    steps = finish(run, run.start(JOBS, 4, **ON_POLICY, **SHORT, **changed))
    assert len(steps) == 4
    check_exact(steps)
    check_deltas(tmp_path / "weights", 4)


def test_the_service_samples_for_verl(new_run: NewRun, service: ChildService, folder: Path) -> None:
    jobs = [
        *JOBS[:16],
        *(Job(task="letters", instance={"name": f"s{number}", "reward": 2.0}) for number in range(6)),
        *(Job(task="letters", instance={"name": f"f{number}", "fails": True}) for number in range(2)),
    ]
    run = new_run(service, folder / "plain")
    keys = {"+trainer__v1__prorl__keep": "informative", "trainer__test_freq": 6, **SHORT}
    steps = finish(run, run.start(jobs, 6, **keys))
    assert len(steps) == 6
    assert all(step["rollouts/rows_total"] >= 32 for step in steps)
    assert all(step["critic/score/max"] <= 1 for step in steps), "groups of equal rewards are not trained on"
    assert sum(step["rollouts/dropped_groups_total"] for step in steps) > 0
    assert sum(step["rollouts/given_up_groups_total"] for step in steps) > 0
    assert 0 < steps[-1]["val-core/letters/reward/mean@1"] < 2


def test_prompts_that_fail_or_are_too_long_are_told_and_replaced(
    new_run: NewRun, service: ChildService, folder: Path
) -> None:
    jobs = [*JOBS[:10], *(Job(task="letters", instance={"name": f"f{number}", "fails": True}) for number in range(6))]
    run = new_run(service, folder / "plain")
    unchanged = {"actor_rollout_ref__actor__optim__lr": 1e-9}  # one that learns may come to say too much each time
    steps = finish(run, run.start(jobs, 6, **TOO_LONG, **unchanged))
    assert all(math.isfinite(step["actor/loss"]) for step in steps)
    assert sum(step.get("rollouts/given_up_total", 0) for step in steps) > 0
    assert (
        sum(step.get("rollouts/dropped_total", 0) for step in steps)
        > sum(step["rollouts/rows_total"] for step in steps)
        > 0
    )
    assert max(step["response_length/max"] for step in steps) <= 17
    assert sum(step.get("training/rollout_failure/evicted_samples", 0) for step in steps) > 0


def test_a_run_goes_on_when_broker_stage_process_and_engine_are_killed(
    new_run: NewRun, service: ChildService, folder: Path, tmp_path: Path
) -> None:
    run = new_run(service, folder / "plain")
    cut = {**TOO_LONG, "trainer__v1__prorl__too_long": "truncate"}
    process = run.start(JOBS, 12, **ON_POLICY, **cut, trainer__rollout_data_dir=tmp_path / "rolled")
    for after, word in ((2, "rollout_broker.json"), (5, "stage_run.json"), (8, "engine.json")):
        until = time.monotonic() + 200
        while len(run.steps()) < after:
            assert process.poll() is None, run.log.read_text()[-6000:]
            assert time.monotonic() < until
            time.sleep(0.05)
        kill(service, word)
    steps = finish(run, process)
    assert len(steps) == 12
    check_exact(steps)  # none is made up
    seen = [line for file in (tmp_path / "rolled").iterdir() for line in file.read_text().splitlines()]
    assert len(seen) == 12 * 32
    assert sum(step.get("rollouts/truncated_total", 0) for step in steps) > 32
    assert max(step["response_length/max"] for step in steps) in (16, 17)


WRONG = {
    f"+{OURS}.endpont=x": "Object contains unknown field `endpont`",
    f"{OURS}.folder=''": "engine_kwargs.prorl.folder is not set",
    "trainer.v1.prorl.too_long=cut": "Invalid enum value 'cut' - at `$.too_long`",
    "+trainer.v1.prorl.parameter_sync_step=4": "Expected `int` <= 1 - at `$.parameter_sync_step`",
    "+trainer.v1.prorl.teacher=teacher": "Object contains unknown field `teacher`",
    "+trainer.v1.prorl.batch.weigth=2": "weigth cannot be set here, only lease_s, max_replacements",
    "actor_rollout_ref.rollout.name=vllm": "actor_rollout_ref.rollout.name must be prorl; it is vllm",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class=null": "agent_loop_manager_class must be prorl_zmq",
    "reward.custom_reward_function.path=x.py": "reward.custom_reward_function.path must be None; it is x.py",
    "actor_rollout_ref.model.lora_rank=4": "here lora=False, merge=False, rank=4",
    f"+{OURS}.lora=true": "here lora=True, merge=False, rank=0",
}
REFUSED = """
import sys
from hydra import compose, initialize_config_dir
import verl
from verl.trainer.ppo.v1 import get_trainer_cls

for words in sys.argv[2:]:
    with initialize_config_dir(sys.argv[1], version_base=None):
        config = compose("prorl", [words])
    try:
        get_trainer_cls("prorl")(config)
    except Exception as error:
        print("ended by", type(error).__name__, error)
"""


def test_keys_that_would_say_nothing_are_refused(tmp_path: Path) -> None:
    command = [framework_python("trainers"), "-c", REFUSED, str(EXAMPLE), *WRONG]
    done = subprocess.run(
        command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended by")]
    assert len(ends) == len(WRONG), done.stderr
    for end, words in zip(ends, WRONG.values(), strict=True):
        assert end.startswith("ended by ConfigError")
        assert words in end


ADAPTER = """
import asyncio, sys
from types import SimpleNamespace

import peft, torch, transformers
import verl.trainer.ppo.v1
from prorl_zmq.integrations.verl import trainer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

class Client:
    def update_weights(self, path, version, *, model, **_):
        print("updated", model, version, path)
    def close(self):
        pass

trainer.RolloutClient = lambda *_, **__: Client()
base, folder = sys.argv[1:]
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
model = peft.get_peft_model(model, config)
settings = SimpleNamespace(lora={}, hf_config=model.config)
engine = SimpleNamespace(
    module=model,
    model_config=settings,
    _uses_fsdp2_cpu_offload_policy=True,
    _is_offload_param=False,
    _qat_enabled=False,
)
engine.get_per_tensor_param = lambda **options: FSDPEngine.get_per_tensor_param(engine, **options)
publishing = trainer.ServiceCheckpointEngine(0, True, served=base, folder=folder, model="a", lora=True)
asyncio.run(publishing.send_weights(engine, 5))
read = peft.PeftModel.from_pretrained(
    transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), f"{folder}/weights-00000005"
)
ids = torch.arange(10, 34)[None]
print("distance", float((read(input_ids=ids).logits - model(input_ids=ids).logits).abs().max()))
"""


@pytest.mark.proof
@pytest.mark.timeout(120)
def test_verls_adapter_is_published_as_an_adapter(tmp_path: Path) -> None:
    """By verl's own function that gives a rollout engine its LoRA."""
    make(tmp_path / "base")
    found = {**environment(tmp_path), "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_PLATFORM": "cpu"}
    found["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parents[1]}"
    command = [framework_python("trainers"), "-c", ADAPTER, str(tmp_path / "base"), str(tmp_path / "weights")]
    done = subprocess.run(command, env=found, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert f"updated a 5 {tmp_path}/weights/weights-00000005" in done.stdout, done.stderr
    assert float(done.stdout.split("distance ")[1].split()[0]) < 1e-5


def test_answers_that_are_always_too_long_end_the_training(
    new_run: NewRun, service: ChildService, folder: Path
) -> None:
    run = new_run(service, folder / "plain")
    none_fits = {**TOO_LONG, "data__max_prompt_length": 8, "data__max_response_length": 8}
    assert run.start(JOBS, 2, **none_fits).wait(200) == 1
    assert "of the last 32 groups each has too few rollouts that are short enough" in run.log.read_text()


def test_a_data_set_without_the_tasks_columns_is_refused(new_run: NewRun, service: ChildService, folder: Path) -> None:
    run = new_run(service, folder / "plain")
    rows = [{"prompt": [{"role": "user", "content": str(number)}], "answer": "x"} for number in range(8)]
    assert run.start(rows, 2, **SHORT).wait(200) == 1
    log = run.log.read_text()
    assert "the data set has rows without task and instance" in log
    assert "WorkerDict" not in log, "verl's workers were not started for nothing"
