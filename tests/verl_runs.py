"""Runs of verl's own trainer, from the example of `prorl init --trainer verl`, on a CPU."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from command_lines import line_of
from framework_python import framework_python
from vllm_python import environment

from prorl_zmq.integrations.dataset_rows import dataset_rows

if TYPE_CHECKING:
    from prorl_zmq import Job
    from prorl_zmq.service.child import ChildService

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "prorl_zmq" / "examples" / "trainers" / "verl"
OURS = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.prorl"
ON_CPU = {
    "trainer.device": "cpu",
    "+ray_kwargs.ray_init.num_gpus": 1,
    "ray_kwargs.ray_init.num_cpus": 32,  # they do not work all at once
    "+ray_kwargs.ray_init.include_dashboard": "false",
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.model.use_remove_padding": "false",
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.use_torch_compile": "false",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": "false",
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
}


FINISH_S = 300.0


class VerlRun:
    """A run in a folder of its own, with 4 prompts of 8 rollouts a step."""

    def __init__(self, service: ChildService, model: Path, folder: Path) -> None:
        self.folder = folder
        self._service = service
        self._model = model
        self._python = framework_python("trainers")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, jobs: list[Job] | list[dict[str, Any]], steps: int, **changed: Any) -> subprocess.Popen[str]:
        """Begin to train; `changed` are keys of verl's configuration, with `__` for the dots."""
        rows = [job if isinstance(job, dict) else {**row_of(job)} for job in jobs]
        data = self.folder / "rows.jsonl"
        data.write_text("".join(json.dumps({**row, "data_source": "letters"}) + "\n" for row in rows))
        keys = {
            **ON_CPU,
            "data.train_files": data,
            "data.val_files": data,
            "data.train_batch_size": 4,
            "data.max_prompt_length": 128,
            "data.max_response_length": 128,
            "actor_rollout_ref.model.path": self._model,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.optim.lr": 3e-3,
            f"{OURS}.folder": self.folder / "weights",
            f"+{OURS}.endpoint": self._service.front_door,
            f"+{OURS}.keep": 100,
            "trainer.logger": "[console,file]",
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": 100,
            "trainer.val_before_train": "false",
            "trainer.test_freq": -1,
            "trainer.save_freq": -1,
            **{name.replace("__", "."): value for name, value in changed.items()},
        }
        command = [self._python, "-m", "verl.trainer.main_ppo", "--config-path", str(EXAMPLE), "--config-name", "prorl"]
        place = environment(self.folder)
        place["PYTHONPATH"] += f":{HERE}"
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [*command, *(f"{name}={value}" for name, value in keys.items())],
                env={
                    **place,
                    "VERL_PLATFORM": "cpu",
                    "VERL_ENGINE_DEVICE": "cuda",
                    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
                    "VERL_FILE_LOGGER_PATH": str(self.folder / "steps.jsonl"),
                    "RAY_DISABLE_MEMORY_MONITOR": "1",
                    "HYDRA_FULL_ERROR": "1",
                },
                cwd=self.folder,
                stdout=log,
                stderr=log,
                text=True,
            )
        self._started.append(process)
        return process

    def wait(self, process: subprocess.Popen[str]) -> None:
        """Wait until training has ended, with nothing left of it."""
        assert process.wait(FINISH_S) == 0, self.log.read_text()[-6000:]
        assert self.remains() == []

    def close(self) -> None:
        """End what a test that failed has left, which would train on."""
        for process in filter(self._is_ours, psutil.process_iter()):
            with suppress(psutil.Error):
                process.kill()
        for started in self._started:
            started.wait(10)

    def remains(self) -> list[str]:
        """Processes of this run that are left, a while after its end."""
        _, left = psutil.wait_procs([one for one in psutil.process_iter() if self._is_ours(one)], timeout=30)
        return [line_of(one) for one in left]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get("VERL_FILE_LOGGER_PATH") == str(self.folder / "steps.jsonl")
        return False

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def steps(self) -> list[dict[str, float]]:
        """What verl logged of each step."""
        file = self.folder / "steps.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["data"] for line in lines]


def row_of(job: Job) -> dict[str, Any]:
    (row,) = dataset_rows([job])
    return row
