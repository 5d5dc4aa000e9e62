"""SkyRL's trainers, in an environment of their own, train a tiny model through a whole service."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from framework_python import framework_python
from vllm_python import environment

from prorl_zmq import Job
from prorl_zmq.integrations.dataset_rows import dataset_rows

torch = pytest.importorskip("torch", reason="it is of the extra [train]")
from safetensors.torch import load_file, save_file  # noqa: E402
from trained import CALLING, JOBS, SMALL_STEP, check_deltas, check_rise, models, service_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.service.child import ChildService

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600), pytest.mark.xdist_group("one service for SkyRL")]

HERE = Path(__file__).parent
STEPS = 18
SEGMENTS: dict[str, Any] = {
    "generator__step_wise_trajectories": True,
    "generator__max_turns": 3,
    "generator__sampling_params__max_generate_length": 96,
    "generator__max_input_length": 2048,
}
"""Rollouts of up to three turns; the model `calls` begins a segment with each. It takes one or two steps until the
policy has learned that calls bring nothing."""
JOBS_OF = {"plain": JOBS, "calls": CALLING}
KEYS_OF: dict[str, dict[str, Any]] = {"plain": {}, "calls": SEGMENTS}
SHOWN = (
    "generate/batch_num_seq",
    "reward/avg_raw_reward",
    "timing/step",
    "timing/train_critic_and_policy",
    "timing/sync_weights",
)


@pytest.fixture(scope="module")
def python() -> str:
    return framework_python("trainers")


@pytest.fixture(scope="module")
def folder(python: str) -> Iterator[Path]:
    with models() as folder:
        yield folder


@pytest.fixture(scope="module", params=["plain", "calls"])
def model(folder: Path, request: pytest.FixtureRequest) -> Path:
    return folder / str(request.param)


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[ChildService]:
    with service_of(model) as service:
        yield service


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words_of(service: ChildService, model: Path, out: Path, rows: list[dict[str, Any]], **changed: Any) -> list[str]:
    """Give SkyRL's command line; `changed` are keys of its configuration, with `__` for the dots."""
    out.mkdir(exist_ok=True)
    keys = {
        "data.train_data": [str(write(out / "train.jsonl", rows))],
        "data.val_data": [str(write(out / "val.jsonl", dataset_rows(JOBS[:3])))],
        "data.dataloader.num_workers": 0,
        "trainer.policy.model.path": model,
        "trainer.policy.optimizer_config.lr": 3e-3,
        "trainer.placement.colocate_all": False,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.epochs": 2,
        "trainer.max_training_steps": STEPS,
        "trainer.eval_interval": STEPS,
        "trainer.ckpt_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.ckpt_path": out / "checkpoints",
        "trainer.export_path": out / "exports",
        "trainer.logger": "console",
        "trainer.print_example_interval": 0,
        "trainer.enable_ray_gpu_monitor": False,
        "generator.n_samples_per_prompt": 8,
        "generator.sampling_params.max_generate_length": 16,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "prorl.endpoint": service.front_door,
        "prorl.weights_folder": out / "weights",
        "prorl.keep_weights": 100,
        **{name.replace("__", "."): value for name, value in changed.items()},
    }
    return [f"{name}={value}" for name, value in keys.items()]


def train(python: str, tmp_path: Path, cases: dict[Path, list[str]]) -> dict[Path, str]:
    """Train, one case after the other; give what ended each."""
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({str(out): words for out, words in cases.items()}))
    done = subprocess.run(
        [python, str(HERE.parent / "skyrl_on_cpu.py"), str(file)],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (tmp_path / "printed").write_text(done.stdout)
    return {out: (out / "error").read_text() if (out / "error").exists() else "" for out in cases}


def steps_of(out: Path, count: int = STEPS) -> list[dict[str, Any]]:
    steps = json.loads((out / "steps.json").read_text())
    return [steps[str(step)] for step in range(1, count + 1)]


def check_pushed(tmp_path: Path, model: Path) -> None:
    """Each version that was pushed are the trainer's weights after so many steps, bit for bit."""
    before = load_file(model / "model.safetensors")
    for version in range(STEPS + 1):
        pushed = load_file(tmp_path / "weights" / f"weights-{version:08d}" / "model-00000.safetensors")
        ours = load_file(tmp_path / f"trainer-{version}.safetensors")
        assert pushed.keys() == ours.keys() == before.keys()
        assert all(torch.equal(pushed[name], ours[name]) for name in ours)
        same = {name for name in ours if torch.equal(ours[name], before[name])}
        assert same == (set() if version else set(ours)), "all tensors change with the first step"


def test_skyrl_trains(python: str, service: ChildService, model: Path, tmp_path: Path) -> None:
    changed: dict[str, Any] = {"trainer__algorithm__off_policy_correction__tis_ratio_type": "token"}
    words = words_of(service, model, tmp_path, dataset_rows(JOBS_OF[model.name]), **changed, **KEYS_OF[model.name])
    assert train(python, tmp_path, {tmp_path: words}) == {tmp_path: ""}
    steps = steps_of(tmp_path)
    assert all(math.isfinite(step["policy/policy_loss"]) for step in steps)
    assert max(step["policy/rollout_train_logprobs_abs_diff_max"] for step in steps) < 1e-4
    assert steps[0]["policy/ratio"] == pytest.approx(1, abs=1e-4)
    versions = [(step["generate/min_weight_version"], step["generate/max_weight_version"]) for step in steps]
    assert versions == [(step, step) for step in range(STEPS)]
    assert steps[-1]["weights/version"] == STEPS
    assert 0 <= steps[-1]["eval/all/avg_score"] <= 1
    rows = max(step["generate/batch_num_seq"] for step in steps)
    assert (rows > 32) == (model.name == "calls"), "some rollouts have several segments"
    check_pushed(tmp_path, model)
    check_rise([step["reward/avg_raw_reward"] for step in steps])
    lines = re.findall(r"batch (\d+): reward \d\.\d+ ± 0\.\d+ \(32 rollouts\)", (tmp_path / "printed").read_text())
    assert [int(number) for number in lines] == list(range(1, STEPS + 1))
    assert "reward rose from 0." in (tmp_path / "printed").read_text()
    print([[round(step[name], 3) for name in SHOWN] for step in steps])


def test_skyrl_trains_with_deltas(python: str, service: ChildService, model: Path, tmp_path: Path) -> None:
    changed: dict[str, Any] = {"trainer__max_training_steps": 4, "trainer__eval_interval": 4}
    changed |= {"prorl__weights_form": "delta", "trainer__policy__optimizer_config__lr": SMALL_STEP}
    rows = dataset_rows(JOBS_OF[model.name])
    words = words_of(service, model, tmp_path, rows, **changed, **KEYS_OF[model.name])
    assert train(python, tmp_path, {tmp_path: words}) == {tmp_path: ""}
    steps = steps_of(tmp_path, 4)
    assert max(step["policy/rollout_train_logprobs_abs_diff_max"] for step in steps) < 1e-4
    assert steps[-1]["weights/version"] == 4
    check_deltas(tmp_path / "weights", 4)


def test_skyrl_trains_while_rollouts_go_on(python: str, service: ChildService, model: Path, tmp_path: Path) -> None:
    changed: dict[str, Any] = {
        "trainer__fully_async__enabled": True,
        "trainer__fully_async__max_staleness_steps": 2,
        "trainer__fully_async__num_parallel_generation_workers": 8,
        "trainer__algorithm__policy_loss_type": "rollout_is",
    }
    words = words_of(service, model, tmp_path, dataset_rows(JOBS_OF[model.name]), **changed, **KEYS_OF[model.name])
    assert train(python, tmp_path, {tmp_path: words}) == {tmp_path: ""}
    steps = steps_of(tmp_path)
    assert all(math.isfinite(step["policy/policy_loss"]) for step in steps)
    assert steps[0]["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert max(step["async/staleness_max"] for step in steps) > 0
    check_pushed(tmp_path, model)
    if model.name == "plain":  # the other may collapse under updates from old weights
        check_rise([step["reward/avg_raw_reward"] for step in steps])
    print([[round(step[name], 3) for name in (*SHOWN, "async/staleness_mean")] for step in steps])


def test_what_cannot_be_trained_on_is_said(python: str, service: ChildService, model: Path, tmp_path: Path) -> None:
    rows = dataset_rows(JOBS[:8])
    bare = [{"prompt": row["prompt"], "answer": "x"} for row in rows]
    failing = dataset_rows([Job(task="letters", instance={"name": f"x{n}", "fails": True}) for n in range(4)])
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"][:-1].clone()}, other / "model.safetensors")
    cases: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
        (bare, {}, "InvalidJob: the data set has rows without task and instance (columns: answer)"),
        ([*rows, *bare], {}, "InvalidJob: the data set has rows without task and instance"),
        (failing, {}, "NotTrainable: 4 of 4 prompts could not be rolled out (handler_failed"),
        (rows, {"prorl__served_model": other}, "InvalidWeights: the tensor lm_head.weight has the shape"),
        (rows, {"prorl__served_model": tmp_path}, "InvalidWeights:"),
        (rows, {"prorl__endpoint": f"ipc://{tmp_path}/nobody", "prorl__timeout_s": 1}, "RequestTimeout:"),
        (rows, {"prorl__endpont": "x"}, "ValueError: Invalid fields {'endpont'} for ProrlConfig"),
        (
            rows,
            {"prorl__weights_form": "half"},
            "ConfigError: prorl.weights_form is one of full, delta, vllm, not",
        ),
        (rows, {"prorl__update_mode": "wait"}, "ConfigError: prorl.update_mode is one of keep, drain, abort"),
        (rows, {"trainer__placement__colocate_all": True}, "ConfigError: the service's engines have GPUs of their own"),
        (rows, {"trainer__policy__model__lora__rank": 8}, "ConfigError: the service's engines load whole models"),
        (rows, {"generator__apply_overlong_filtering": True}, "ConfigError: only SkyRL's own generator has generator."),
        (rows, {"generator__use_conversation_multi_turn": False}, "ConfigError: only SkyRL's own generator has"),
        ([*rows[:3], *failing[:1]], {}, ""),
    ]
    words: dict[Path, list[str]] = {}
    for number, (data, changed, _) in enumerate(cases):
        changed |= {"trainer__max_training_steps": 1, "trainer__eval_interval": 1}
        words[tmp_path / str(number)] = words_of(service, model, tmp_path / str(number), data, **changed)
    ends = train(python, tmp_path, words)
    for (_, _, said), end in zip(cases, ends.values(), strict=True):
        assert end.startswith(said)
        assert bool(end) == bool(said), end
    (step,) = steps_of(tmp_path / str(len(cases) - 1), 1)
    assert step["generate/replaced_prompts"] >= 1
    assert step["generate/batch_num_seq"] >= 32
    assert not list(tmp_path.glob("3/weights/weights-*")), "no engine was shown the weights that do not fit"


def test_the_example_starts_as_skyrl_starts_it(python: str, folder: Path, tmp_path: Path) -> None:
    """It ends where SkyRL's workers ask for a GPU's package: the configuration, Ray and the data set are behind it."""
    with ExitStack() as stack:
        written = files("prorl_zmq.examples").joinpath("trainers", "skyrl")
        for name in ("make_data.py", "train.sh"):
            shutil.copy(stack.enter_context(as_file(written.joinpath(name))), tmp_path)
    assert len((tmp_path / "train.sh").read_text().splitlines()) < 40
    variables = environment(tmp_path)
    Path(variables["PYTHONPATH"], "sitecustomize.py").write_text(
        "import sys, typing, typing_extensions\n"
        "if sys.version_info < (3, 12): typing.TypedDict = typing_extensions.TypedDict\n"
    )
    variables |= {"PATH": f"{Path(python).parent}:{os.environ['PATH']}", "RAY_TMPDIR": str(folder)}
    subprocess.run([python, "make_data.py"], cwd=tmp_path, env=variables, check=True, timeout=60)
    for words, said in (
        ([f"trainer.policy.model.path={folder / 'plain'}"], "No module named 'flash_attn'"),
        (["trainer.placement.colocate_all=true"], "set trainer.placement.colocate_all=false"),
    ):
        command = ["sh", "train.sh", *words, "trainer.enable_ray_gpu_monitor=false"]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode != 0
        assert said in done.stderr + done.stdout, done.stderr[-6000:]
