"""SkyRL's trainer on a CPU, with our experiment; run by a Python that has SkyRL (see `framework_python`).

    python skyrl_on_cpu.py CASES

SkyRL's workers are for CUDA only, so the model is trained here, behind the calls of SkyRL's dispatch; all else is
SkyRL's: configuration, data set, loop, checks, advantages, loss function. CASES is a JSON object: for each folder the
`key=value` words of one training. The folder gets `steps.json`, what SkyRL logs of each step; `trainer-N.safetensors`,
the trainer's own tensors when it saved its model for the N-th time; and `error`, what ended it.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it, and SkyRL takes the other

from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints import main_base
from skyrl.train.utils import validate_cfg

from prorl_zmq.integrations.skyrl.experiment import ProrlExp, ProrlTrainConfig


class Dispatch:
    """SkyRL's `WorkerDispatch` for one model in this process. It cannot transfer weights to engines."""

    def __init__(self, trainer: Any, out: Path) -> None:
        self._settings = trainer.cfg.trainer
        self._out = out
        self._saved = 0
        policy = self._settings.policy
        self._model = AutoModelForCausalLM.from_pretrained(policy.model.path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=policy.optimizer_config.lr)
        self._loss = PolicyLossRegistry.get(self._settings.algorithm.policy_loss_type)

    def get_lcm_dp_size(self) -> int:
        return 1

    def empty_cache(self, model: str | None = None) -> None:
        pass

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        return [data[start:end] for start, end in boundaries]

    def forward_from_staged(self, model: str, data: Any) -> WorkerOutput:
        with torch.no_grad():
            return WorkerOutput(loss_fn_outputs=[{"logprobs": row} for row in self._log_probs(data).tolist()])

    def forward_backward_from_staged(self, model: str, data: Any) -> WorkerOutput:
        log_probs = self._log_probs(data)
        loss, metrics = self._loss(
            log_probs,
            data.get("action_log_probs"),
            data["advantages"],
            config=self._settings.algorithm,
            loss_mask=data["loss_mask"],
            rollout_logprobs=data["rollout_logprobs"],
        )
        loss.backward()
        ratios = (log_probs - data["rollout_logprobs"]).exp()[data["loss_mask"] > 0]
        return WorkerOutput(metrics={**metrics, "policy_loss": loss.item(), "ratio": ratios.mean().item()})

    def optim_step(self, model: str) -> float:
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._settings.policy.optimizer_config.max_grad_norm
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm.item()

    def save_hf_model(self, model: str, folder: str, tokenizer: Any) -> None:
        self._model.save_pretrained(folder)
        save_file(self._model.state_dict(), self._out / f"trainer-{self._saved}.safetensors")
        self._saved += 1

    def _log_probs(self, data: Any) -> torch.Tensor:
        """Return those of the responses, which end where the sequences do: [rows, longest response]."""
        tokens, mask = data["sequences"], data["attention_mask"]
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._model(tokens, attention_mask=mask, position_ids=places).logits
        spoken = slice(-data.metadata["response_length"] - 1, -1)
        chosen = logits[:, spoken].float().log_softmax(-1).gather(-1, tokens[:, 1:][:, spoken.start + 1 :, None])
        return chosen.squeeze(-1)


class Steps:
    """SkyRL's tracker: keeps what is logged."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._steps: dict[int, dict[str, Any]] = {}

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        self._steps.setdefault(step, {}).update(data)

    def log_exception(self, error: Exception, step: int) -> None:
        pass

    def finish(self) -> None:
        self._file.write_text(json.dumps(self._steps, default=float))


class CpuExp(ProrlExp):
    out: Path

    def get_tracker(self) -> Steps:
        return Steps(self.out / "steps.json")

    def get_trainer(self, **parts: Any) -> Any:
        trainer = super().get_trainer(**parts)
        trainer.build_models = lambda *workers: setattr(trainer, "dispatch", Dispatch(trainer, self.out))
        return trainer


def train(words: list[str]) -> None:
    cfg = ProrlTrainConfig.from_cli_overrides(words)
    validate_cfg(cfg)
    torch.manual_seed(0)
    CpuExp(cfg).run()


def main() -> None:
    # The workers' module imports flash_attn; the data set's, eight processes.
    workers = SimpleNamespace(PolicyWorker=None, CriticWorker=None, RefWorker=None)
    sys.modules["skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker"] = workers  # type: ignore[assignment]
    main_base.PromptDataset = lambda **options: PromptDataset(**{**options, "num_workers": 1})
    for folder, words in json.loads(Path(sys.argv[1]).read_text()).items():
        CpuExp.out = Path(folder)
        try:
            train(words)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            (CpuExp.out / "error").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
