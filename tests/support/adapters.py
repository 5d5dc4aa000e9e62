"""PEFT adapters for tests: of real models by peft, and small files without it."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file
from support.later import Later

from prorl_zmq.inference.adapters import CONFIG, PREFIX, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import peft
    import torch
    import transformers

    from prorl_zmq import Trajectory
else:
    peft, torch, transformers = Later("peft"), Later("torch"), Later("transformers")

BASE = {"layers.0.q_proj": (6, 4), "layers.0.v_proj": (2, 4), "layers.1.q_proj": (6, 4), "layers.1.v_proj": (2, 4)}
"""The linear layers of a base model of nothing else."""
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


def small_base(folder: Path) -> Path:
    """Write a base model's weights, with embeddings."""
    folder.mkdir(parents=True)
    shapes = {**BASE, "embed_tokens": (9, 4), "lm_head": (9, 4)}
    tensors = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file({**tensors, "norm.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    return folder


def matrices(rank: int = 2, seed: int = 0) -> dict[str, Any]:
    """Return an adapter's tensors for all layers of `BASE`."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for name, (outputs, inputs) in BASE.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = random.random((rank, inputs)).astype(np.float32)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = random.random((outputs, rank)).astype(np.float32)
    return tensors


def small_adapter(folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write an adapter of `small_base`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**PLAIN, **config}))
    save_file(matrices() if tensors is None else tensors, folder / WEIGHTS)
    return folder


@contextmanager
def peft_model() -> Iterator[None]:
    """Let peft make its model: it asks transformers for an attribute that is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def peft_adapter(base: Path, folder: Path, seed: int, rank: int = 8) -> Path:
    """Have peft save an adapter with random matrices of all linear layers, which changes every distribution much.

    Some log-prob of an answer that another such adapter sampled differs by more than 1.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=rank, lora_alpha=4 * rank, target_modules="all-linear", init_lora_weights=False)
    with peft_model():
        peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


class PeftReference:
    """What peft says of tokens that an engine sampled at temperature 1, by forward passes of whole sequences."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._models: dict[Path, Any] = {}

    def logprobs(self, adapter: Path | None, sequences: Sequence[Sequence[int]], generated: int) -> Any:
        """Return the log-probs of the last `generated` tokens of sequences of one length, float32 [N, generated].

        Args:
            adapter: the folder that peft saved; None: of the base model alone.
            sequences: prompt and answer of each.
            generated: how many tokens of each are the answer.
        """
        ids = torch.tensor(np.array(sequences, np.int64))
        with torch.inference_mode():
            scores = torch.log_softmax(self._model(adapter)(input_ids=ids[:, :-1]).logits, -1)
        return scores.gather(2, ids[:, 1:, None])[:, -generated:, 0].numpy()

    def likeliest(self, adapter: Path | None, prompt: Sequence[int], tokens: int) -> list[int]:
        """Return what follows a prompt if the likeliest token is always taken."""
        ids = [*prompt]
        with torch.inference_mode():
            for _ in range(tokens):
                ids.append(int(self._model(adapter)(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def gap(self, adapter: Path, trajectories: Sequence[Trajectory]) -> float:
        """Return the largest difference of a log-prob of trajectories of one turn."""
        worst = 0.0
        for one in trajectories:
            generated = int(one.loss_mask.sum())
            assert generated > 0
            assert one.loss_mask[-generated:].all()
            theirs = self.logprobs(adapter, [one.token_ids], generated)[0]
            worst = max(worst, float(np.abs(theirs - one.logprobs[-generated:]).max()))
        return worst

    def _model(self, adapter: Path | None) -> Any:
        key = adapter or self._base
        if key not in self._models:
            model = transformers.AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
            with peft_model():
                applied = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
            self._models[key] = applied.eval()
        return self._models[key]
