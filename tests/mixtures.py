"""Tiny mixtures of experts, and a trainer's side of records: replayed routes and renormalised log-probs.

Also imported by scripts in vLLM's Python.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from prorl_zmq.examples.trainers.shared.make_model import VOCABULARY, make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from prorl_zmq.inference.engine import Generation

LAYERS, EXPERTS, CHOSEN = 4, 16, 4
NOISE = 0.01
KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}


def make_mixture(folder: Path, kind: str, seed: int) -> None:
    """Write a mixture with random weights whose log-probs depend on the routes."""
    tokenizer = make_tokenizer()
    config, model = KINDS[kind]
    shape: dict[str, Any] = {"head_dim": 32, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {}
    torch.manual_seed(seed)
    made = model(
        config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            norm_topk_prob=kind == "qwen3_moe",  # vLLM has one form for each family
            max_position_embeddings=4096,
            initializer_range=0.15,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **shape,
        )
    )
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class TrainersMixture:
    """A mixture as a trainer has it, whose routers may choose by disturbed logits or take recorded routes."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._normalised = getattr(self._model.config, "norm_topk_prob", False)
        self._routers = [
            module for name, module in self._model.named_modules() if type(module).__name__.endswith("TopKRouter")
        ]

    def logits(
        self, tokens: NDArray[np.int32], routes: NDArray[Any] | None = None, *, noise: float = 0.0
    ) -> torch.Tensor:
        """Give the logits, float32 [T - 1, V], of the tokens after each but the last.

        Args:
            tokens: of a prompt and its answer.
            routes: [R, layers, k] for the first R of the tokens; the routers choose for the others.
            noise: deviation of what is added to the logits of routers, for their choice only.
        """
        noises = torch.Generator().manual_seed(1)

        def choose(layer: int, logits: torch.Tensor) -> torch.Tensor:
            disturbed = logits.float() + noise * torch.randn(logits.shape, generator=noises)
            ids = disturbed.topk(CHOSEN, -1).indices
            if routes is not None:
                ids[: len(routes)] = torch.from_numpy(routes[: len(ids), layer].astype(np.int64))
            return ids

        with self._choosing(choose), torch.inference_mode():
            given = torch.from_numpy(tokens.astype(np.int64))[None, :-1]
            return self._model(given).logits[0].float()

    def routes(self, tokens: NDArray[np.int32]) -> NDArray[Any]:
        """Give the routers' own choices, [T - 1, layers, k], for the tokens but the last."""
        chosen: list[NDArray[Any]] = []

        def choose(_: int, logits: torch.Tensor) -> torch.Tensor:
            ids = logits.topk(CHOSEN, -1).indices
            chosen.append(ids.numpy())
            return ids

        with self._choosing(choose), torch.inference_mode():
            self._model(torch.from_numpy(tokens.astype(np.int64))[None, :-1])
        return np.stack(chosen, axis=1)

    def gap(self, tokens: NDArray[np.int32], done: Generation, routes: NDArray[Any] | None) -> float:
        """Give the largest difference of a turn's log-probs from those here, where the routers' choice is disturbed."""
        logits = self.logits(tokens, routes, noise=NOISE)
        return float(np.abs(logprobs_of(logits, tokens, len(tokens) - len(done.token_ids)) - done.logprobs).max())

    @contextmanager
    def _choosing(self, choose: Any) -> Iterator[None]:
        def hook(layer: int) -> Any:
            def replace(_: Any, __: Any, output: Any) -> Any:
                logits, weights, _ids = output
                ids = choose(layer, logits)
                shares = torch.softmax(logits.float(), -1).gather(-1, ids)
                if self._normalised:
                    shares = shares / shares.sum(-1, keepdim=True)
                return logits, shares.to(weights.dtype), ids

            return replace

        hooks = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(self._routers)]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()


def logprobs_of(logits: torch.Tensor, tokens: NDArray[np.int32], prompt: int, temperature: float = 1.0) -> Any:
    """Give the log-probs, float32 [G], of a turn's tokens from `TrainersMixture.logits` of the whole text."""
    scores = torch.log_softmax(logits / temperature, -1)
    return scores.gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[prompt - 1 :, 0].numpy()


def renormalised(
    logits: torch.Tensor,
    tokens: NDArray[np.int32],
    prompt: int,
    temperature: float,
    ids: NDArray[np.int32],
    counts: NDArray[np.int32],
) -> Any:
    """Give the log-probs of a turn's tokens over their masks: temperature first, then the support, then the sum."""
    scaled = logits[prompt - 1 :] / temperature
    kept = torch.zeros(scaled.shape, dtype=torch.bool)
    kept[np.repeat(np.arange(len(counts)), counts), ids] = True
    scores = torch.log_softmax(scaled.masked_fill(~kept, -torch.inf), -1)
    return scores.gather(1, torch.from_numpy(tokens[prompt:].astype(np.int64))[:, None])[:, 0].numpy()
