"""TRL's trainers, as they are, train a tiny model through a whole service with the transformers engine."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.commands import prorl

from prorl_zmq import EpisodeLimits, Job, RolloutClient
from prorl_zmq.errors import ConfigError, InvalidJob, NotTrainable, RequestTimeout

torch = pytest.importorskip("torch", reason="it is of the extra [trl]")
pytest.importorskip("trl", reason="it is of the extra [trl]")
from datasets import Dataset, IterableDataset  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trained import CALLING, JOBS, SMALL_STEP, check_deltas, check_rise, kill, models, service_of  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: E402
from vllm_python import environment, vllm_python  # noqa: E402
from vllm_server import ON_CPU, SMALL  # noqa: E402

from prorl_zmq.data.rows import rows_of  # noqa: E402
from prorl_zmq.integrations.trl import (  # noqa: E402
    Evaluations,
    GrpoRollouts,
    RolloutWorker,
    WeightTransfer,
    continue_from,
    dataset_rows,
    job_maker,
    rollout_reward,
)
from prorl_zmq.integrations.trl.on_cpu import use_cpu  # noqa: E402
from prorl_zmq.service.child import ChildService  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Group
    from prorl_zmq.data.rows import Row

pytestmark = [
    pytest.mark.xdist_group("one service for TRL"),
    pytest.mark.filterwarnings("ignore"),  # TRL's own, of what it will change
]

STEPS = 18
ASYNC_STEPS = 36
"""Of a policy that learns from turns of older weights, and from calls that bring nothing."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with models() as folder:
        yield folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return folder / "calls"


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[ChildService]:
    with service_of(model) as service:
        yield service


def connect(service: ChildService) -> RolloutClient:
    return RolloutClient(service.front_door, timeout_s=90)


def rollouts_of(service: ChildService, model: Path, tmp_path: Path, turns: int = 1, **options: Any) -> GrpoRollouts:
    return GrpoRollouts(
        model,
        tmp_path / "weights",
        connect=lambda: connect(service),
        make_job=job_maker(EpisodeLimits(max_turns=turns), max_tokens=16),
        **{"publisher_options": {"keep": 100}, **options},
    )


def trainer_of(
    rollouts: GrpoRollouts, model: Path, tmp_path: Path, rows: Any = None, peft_config: Any = None, **options: Any
) -> GRPOTrainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        **options,
    }
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_steps=1,
        report_to=[],
        **settings,
    )
    data = Dataset.from_list(dataset_rows(JOBS)) if rows is None else rows
    return GRPOTrainer(
        str(model), rollout_reward, args=args, train_dataset=data, rollout_func=rollouts, peft_config=peft_config
    )


def wait_for_failure(worker: RolloutWorker) -> None:
    for _ in range(600):
        worker.check_health(60.0)
        time.sleep(0.1)


def async_trainer_of(
    service: ChildService, model: Path, tmp_path: Path, steps: int
) -> tuple[AsyncGRPOTrainer, RolloutWorker]:
    args = AsyncGRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=32,
        num_generations=8,
        max_steps=steps,
        learning_rate=1e-3,
        token_budget=-1,
        max_completion_length=512,
        logging_steps=1,
        save_steps=1,
        report_to=[],
    )
    data = Dataset.from_list(dataset_rows(CALLING))
    make_job = job_maker(EpisodeLimits(max_turns=3), max_tokens=64)  # one in eight has several segments
    worker = RolloutWorker(data, args, connect=lambda: connect(service), make_job=make_job)
    transfer = WeightTransfer(
        model, tmp_path / "weights", connect=lambda: connect(service), publisher_options={"keep": 100}
    )
    trainer = AsyncGRPOTrainer(
        str(model), args=args, train_dataset=data, rollout_worker=worker, weight_transfer=transfer
    )
    return trainer, worker


def kill_all(service: ChildService, trainer: Any, killed: list[str]) -> None:
    """Kill broker, RUN stage process and engine once each, in the middle of a run of 12 steps."""
    for step, word in ((2, "rollout_broker.json"), (5, "stage_run.json"), (8, "engine.json")):
        while trainer.state.global_step < step:
            time.sleep(0.02)
        kill(service, word)
        killed.append(word)


def largest_gap(rows: list[Row], model: Path, weights: Path) -> float:
    """The largest difference of the rows' log-probs from those of the weights that they name."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    gaps = [0.0]
    for version in sorted({row.versions[0] for row in rows}):
        policy.load_state_dict(load_file(weights / f"weights-{version:08d}" / "model-00000.safetensors"), strict=False)
        for row in rows:
            if row.versions == [version]:
                ids = torch.tensor(row.arrays.token_ids[None].astype("int64"))
                with torch.no_grad():
                    logprobs = policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                gap = (logprobs.numpy() - row.arrays.logprobs[1:])[row.arrays.loss_mask[1:]]
                gaps.append(float(abs(gap).max()))
    return max(gaps)


def check_pushed(tmp_path: Path, model: Path, versions: range, checkpoint: int = 0) -> None:
    """What was pushed as version v are the weights of the checkpoint after v steps, bit for bit."""
    before = load_file(model / "model.safetensors")
    for version in versions:
        pushed = load_file(tmp_path / "weights" / f"weights-{version:08d}" / "model-00000.safetensors")
        step = version - checkpoint
        saved = load_file(tmp_path / "out" / f"checkpoint-{step}" / "model.safetensors") if step else before
        assert pushed.keys() == saved.keys()
        assert all(torch.equal(pushed[name], saved[name]) for name in saved)
        assert all(not torch.equal(saved[name], before[name]) for name in saved) or not step, "all tensors change"


def check_grpo(service: ChildService, model: Path, tmp_path: Path) -> None:
    with rollouts_of(service, model, tmp_path, batch_options={"max_staleness": 0}) as rollouts:
        trainer = trainer_of(rollouts, model, tmp_path)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == STEPS
    assert all(math.isfinite(entry["loss"]) for entry in steps)
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) < 1e-4
    assert steps[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
    check_pushed(tmp_path, model, range(STEPS))
    check_rise([entry["reward"] for entry in steps])
    print([(entry["reward"], entry["step_time"]) for entry in steps])


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_grpo_trains(service: ChildService, model: Path, tmp_path: Path) -> None:
    check_grpo(service, model, tmp_path)


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_grpo_trains_with_deltas(service: ChildService, model: Path, tmp_path: Path) -> None:
    with rollouts_of(service, model, tmp_path, publisher_options={"form": "delta"}) as rollouts:
        trainer = trainer_of(rollouts, model, tmp_path, max_steps=4, learning_rate=SMALL_STEP)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) < 1e-4
    check_deltas(tmp_path / "weights", 3)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_grpo_trains_with_a_real_vllm(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = json.dumps(["--logprobs-mode", "processed_logprobs", *SMALL])
    engine = f'kind = "vllm", python = "{vllm_python()}", arguments = {flags}'
    python_path = f"{environment(tmp_path)['PYTHONPATH']}{os.pathsep}{folder / 'package'}"
    for name, value in {**ON_CPU, "PYTHONPATH": python_path}.items():
        monkeypatch.setenv(name, value)
    with service_of(folder / "plain", engine=engine) as service:
        check_grpo(service, folder / "plain", tmp_path)


@pytest.mark.proof
@pytest.mark.timeout(120)
def test_adapters_are_merged_into_what_is_served(service: ChildService, model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="`make trainers` installs peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    with rollouts_of(service, model, tmp_path) as rollouts:
        trainer = trainer_of(rollouts, model, tmp_path, peft_config=adapters, max_steps=3)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) < 1e-4
    before, after = (
        load_file(tmp_path / "weights" / f"weights-0000000{n}" / "model-00000.safetensors") for n in (0, 2)
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{n}.self_attn.{part}_proj.weight" for n in (0, 1) for part in "qv"}


@pytest.mark.proof
@pytest.mark.timeout(180)
def test_adapters_are_served_as_adapters(model: Path, tmp_path: Path) -> None:
    """The engine's own weights are the base's to the end, and rollouts are the adapter's, as the policy."""
    peft = pytest.importorskip("peft", reason="`make trainers` installs peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    base = 'name = "base", frozen = true, lora = {slots = 2, rank = 8}, kind = "transformers"'
    with (
        service_of(model, engine=base) as service,
        rollouts_of(service, model, tmp_path, publisher_options={"keep": 100, "lora": True}) as rollouts,
    ):
        trainer = trainer_of(rollouts, model, tmp_path, peft_config=adapters, max_steps=3)
        trainer.train()
        with connect(service) as client:
            (backend,) = [one.backend for one in client.backends.list()]
    assert (backend.name, backend.weight_version) == ("base", 0)
    assert backend.adapters["policy"][-1] == 2
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) < 1e-4
    before, after = (
        load_file(tmp_path / "weights" / f"weights-0000000{n}" / "adapter_model.safetensors") for n in (0, 2)
    )
    assert all(not torch.equal(before[name], after[name]) for name in before if "lora_B" in name)


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_async_grpo_trains_on_several_segments(
    service: ChildService, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu()
    trainer, worker = async_trainer_of(service, model, tmp_path, ASYNC_STEPS)
    samples: list[Any] = []
    put = worker.rollout_buffer.put
    monkeypatch.setattr(worker.rollout_buffer, "put", lambda sample: (samples.append(sample), put(sample)))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == ASYNC_STEPS
    assert all(math.isfinite(entry["loss"]) for entry in steps)
    assert steps[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert max(entry["sample/staleness_max"] for entry in steps) <= trainer.args.max_staleness
    check_pushed(tmp_path, model, range(1, ASYNC_STEPS + 1), checkpoint=1)
    check_rise([entry["reward"] for entry in steps])
    groups: dict[int, list[Any]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    assert max(len(group) for group in groups.values()) > trainer.args.num_generations, (
        "some rollouts have several segments"
    )
    print([(entry["reward"], entry["sample/staleness_mean"], entry.get("perf/step_s")) for entry in steps])


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_run_goes_on_when_broker_stage_process_and_engine_are_killed(
    service: ChildService, model: Path, tmp_path: Path
) -> None:
    with rollouts_of(service, model, tmp_path) as rollouts:
        trainer = trainer_of(rollouts, model, tmp_path, max_steps=12)
        killed: list[str] = []
        threading.Thread(target=kill_all, args=(service, trainer, killed), daemon=True).start()
        seen: list[str] = []
        parts = rollouts._parts

        def noting(everyone: Any, trainer: Any) -> Any:
            made = parts(everyone, trainer)
            seen.extend(job_id for part in made for job_id in part["job_id"])
            return made

        rollouts._parts = noting  # type: ignore[method-assign]
        trainer.train()
    assert len(killed) == 3
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 12
    assert len(seen) == len(set(seen)) == 12 * 32, "no sample twice"
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps) < 1e-4, "none made up"


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_an_async_run_goes_on_when_broker_stage_process_and_engine_are_killed(
    service: ChildService, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu()
    trainer, worker = async_trainer_of(service, model, tmp_path, 12)
    groups: list[Group] = []
    put = worker._put

    def noting(group: Group) -> int:
        groups.append(group)
        return put(group)

    monkeypatch.setattr(worker, "_put", noting)
    killed: list[str] = []
    threading.Thread(target=kill_all, args=(service, trainer, killed), daemon=True).start()
    trainer.train()
    assert len(killed) == 3
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 12
    job_ids = [trajectory.job_id for group in groups for trajectory in group.trajectories]
    assert len(job_ids) == len(set(job_ids)), "no sample twice"
    rows = rows_of(groups)
    assert len(rows) >= 12 * 32, "each segment is a sample"
    assert largest_gap(rows, model, tmp_path / "weights") < 1e-4, "none made up"


@pytest.mark.proof
@pytest.mark.timeout(180)
def test_what_cannot_be_trained_on_is_said(service: ChildService, model: Path, tmp_path: Path) -> None:
    rows = dataset_rows(JOBS[:4])
    bare = [{"prompt": row["prompt"], "answer": "x"} for row in rows]
    twice = [*rows, {**rows[0], "task": "math"}]
    failing = dataset_rows([Job(task="letters", instance={"name": "x", "fails": True})])
    small = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 1, "save_strategy": "no"}
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (bare, {}, InvalidJob, "rows without task and instance"),
        (twice, {}, InvalidJob, "two rows of the data set have one prompt"),
        (failing, {}, NotTrainable, r"1 of 1 prompts could not be rolled out \(handler_failed 5 times\)"),
        (rows, {"max_completion_length": 2, "top_k": 1}, NotTrainable, "max_completion_length = 2"),
    ]
    for number, (data, options, error, words) in enumerate(cases):
        place = tmp_path / str(number)
        with rollouts_of(service, model, place) as rollouts:
            trainer = trainer_of(rollouts, model, place, Dataset.from_list(data), **small, **options)
            with pytest.raises(error, match=words):
                trainer.train()
    with rollouts_of(service, model, tmp_path / "stream") as rollouts:
        stream = IterableDataset.from_generator(lambda: iter(rows))
        trainer = trainer_of(rollouts, model, tmp_path / "stream", stream, **small)
        with pytest.raises(ConfigError, match="IterableDataset cannot be looked up"):
            trainer.train()
    with pytest.raises(ConfigError, match="too_long is"):
        rollouts_of(service, model, tmp_path, too_long="cut")
    with rollouts_of(service, model, tmp_path / "cut", too_long="truncate") as rollouts:
        trainer = trainer_of(rollouts, model, tmp_path / "cut", **small, max_completion_length=3)
        trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert step["rollouts/truncated"] > 0
    assert step["completions/max_length"] == 3


@pytest.mark.proof
@pytest.mark.timeout(120)
def test_a_worker_whose_rollouts_are_all_too_long_says_so(service: ChildService, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_generations": 8, "per_device_train_batch_size": 8, "max_completion_length": 1}
    args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **settings)
    make_job = job_maker(EpisodeLimits(max_turns=1), max_tokens=16)
    options = {"keep": "all"}
    worker = RolloutWorker(
        dataset_rows(JOBS), args, connect=lambda: connect(service), make_job=make_job, batch_options=options
    )
    worker.start()
    try:
        with pytest.raises(NotTrainable, match="more than max_completion_length = 1 tokens"):
            wait_for_failure(worker)
    finally:
        worker.stop()


@pytest.mark.proof
def test_a_worker_says_what_is_wrong_before_it_starts(tmp_path: Path) -> None:
    args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=8, report_to=[])
    rows = dataset_rows(JOBS)
    for data, count, error, words in (
        ([], 8, ConfigError, "no rows"),
        (rows, 3, ConfigError, "8 samples, which are not whole groups of num_generations = 3"),
        ([{"prompt": "x"}], 8, InvalidJob, "rows without task"),
    ):
        args.num_generations = count
        with pytest.raises(error, match=words):
            RolloutWorker(data, args)
    args.num_generations = 8
    worker = RolloutWorker(rows, args, connect=lambda: RolloutClient(f"ipc://{tmp_path}/nobody", timeout_s=0.5))
    worker.start()
    worker.check_health(60.0)
    time.sleep(1.2)
    with pytest.raises(RequestTimeout, match="no rollout came for 1 s"):
        worker.check_health(1.0)
    worker.stop()


def test_evaluations_and_checkpoints_that_cannot_be_used_are_refused() -> None:
    rows = dataset_rows(JOBS[:1])
    for data, every, error, words in (
        ([], 1, ConfigError, "no rows"),
        (rows, 0, ConfigError, "at least 1; not 0"),
        ([{"prompt": "x"}], 1, InvalidJob, "rows without task"),
    ):
        with pytest.raises(error, match=words):
            Evaluations(None, data, every)
    trainer, transfer = SimpleNamespace(args=SimpleNamespace(weight_sync_steps=3)), SimpleNamespace()
    for name in ("out", "out/checkpoint-last", "checkpoint-"):
        with pytest.raises(ConfigError, match="checkpoint-STEP"):
            continue_from(trainer, transfer, name)
    continue_from(trainer, transfer, "a-b/checkpoint-8/")
    assert (trainer.model_version, transfer.version) == (2, 2)


EXAMPLE_STEPS = 3
RISES = 18
LINE = r"step (\d+): reward (\d\.\d+) ± (\d\.\d+|nan) \((\d+) rollouts\)"


@pytest.fixture(scope="module")
def example() -> Iterator[Path]:
    """The example as `prorl init` writes it, with its model."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as place:
        folder = Path(place, "example")
        assert prorl("init", "--trainer", "trl", folder).returncode == 0
        assert all(len((folder / name).read_text().splitlines()) < 80 for name in ("grpo.py", "async_grpo.py"))
        run_in(folder, "make_model.py", "model")
        yield folder


@pytest.fixture(scope="module")
def example_service(example: Path) -> Iterator[ChildService]:
    """A service by the example's own topology."""
    topology = (example / "topology.toml").read_text()
    for name in ("letters.py", "model"):
        assert f'"{name}"' in topology
        topology = topology.replace(f'"{name}"', f'"{example / name}"')
    with (
        tempfile.TemporaryDirectory(prefix="prorl-t-") as place,
        ChildService(Path(place), topology) as service,
        RolloutClient(service.front_door, timeout_s=90) as client,
    ):
        service.wait_ready(client)
        yield service


def run_in(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=290, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", ["grpo.py", "async_grpo.py"])
def test_the_example_shows_that_the_reward_rises(
    program: str, example: Path, example_service: ChildService, tmp_path: Path
) -> None:
    text = run_in(
        example, program, "--cpu", "--model=model", "--out", str(tmp_path), "--connect", example_service.front_door
    )
    lines = re.findall(LINE, text)
    assert [int(step) for step, *_ in lines] == list(range(1, RISES + 1))
    means = [float(mean) for _, mean, *_ in lines]
    assert all(0 < float(error) < 0.2 for *_, error, _ in lines)
    check_rise(means)
    assert text.splitlines()[-1].startswith("reward rose from 0.")
    check_last_push(tmp_path, RISES + (program == "async_grpo.py"))


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_the_async_example_is_resumed_and_evaluated(
    example: Path, example_service: ChildService, tmp_path: Path
) -> None:
    program = ("async_grpo.py", "--cpu", "--model=model", "--batch=8", "--group=4", "--lr=0.001", "--save-steps=2")
    place = ("--out", str(tmp_path), "--connect", example_service.front_door)
    text = run_in(example, *program, *place, "--steps=3", "--eval-every=2")
    assert re.search(r"step 2: evaluation: reward 0\.\d+ ± 0\.\d+ \(64 rollouts\)", text)
    assert "'eval_reward':" in text
    assert text.splitlines()[-1] == "reward: 3 steps are too few to tell a rise from chance; 6 are needed"
    check_last_push(tmp_path, 4)
    text = run_in(example, *program, *place, "--steps=5", "--resume")
    assert re.findall(r"step (\d+): reward", text) == ["4", "5"]
    check_last_push(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    with connect(example_service) as client:
        assert {one.backend.weight_version for one in client.backends.list()} == {6}


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_the_example_trains_on_two_processes(example: Path, example_service: ChildService, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    program = [*launch, "--mixed_precision=no", "--dynamo_backend=no", "grpo.py"]
    options = ["--cpu", "--batch=8", "--group=4", "--model=model", "--connect", example_service.front_door]

    def train(*more: str) -> str:
        return run_in(example, *program, *options, "--lr=0.001", "--out", str(out), *more)

    text = train(f"--steps={EXAMPLE_STEPS}", "--save-steps=2", "--eval-every=2")
    assert {"rewards/rollout_reward/mean", "eval_reward", "step_time"} <= set(re.findall(r"'([\w/]+)':", text))
    assert [int(step) for step, *_ in re.findall(LINE, text)] == [1, 2, 3], "by the main process alone"
    check_last_push(out, EXAMPLE_STEPS)
    train("--steps=5", "--save-steps=2", "--resume")
    check_last_push(out, 5)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


def check_last_push(out: Path, version: int) -> None:
    """The engines' newest weights are the saved model's; the last two versions stay."""
    pushed = sorted((out / "weights").glob("weights-*/*.safetensors"))
    assert [path.parent.name for path in pushed] == [f"weights-{each:08d}" for each in (version - 1, version)]
    weights, saved = load_file(pushed[-1]), load_file(out / "model.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
