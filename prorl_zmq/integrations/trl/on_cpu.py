"""`AsyncGRPOTrainer` on a CPU: PyTorch versions of TRL 1.16's CUDA-only parts. For examples, not for speed."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch


def use_cpu() -> None:
    """Make this process's `AsyncGRPOTrainer` run without a GPU; call it before one is made."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    trainer: Any = async_grpo_trainer
    trainer.get_peak_flops_per_device = lambda *_: None
    packer: Any = packing
    packer._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)  # noqa: SLF001 - TRL has no other place


def attention(
    query: Any, key: Any, value: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: Any, **_more: Any
) -> Any:
    """Compute attention per segment, whose queries are the last of its keys. Tensors are [tokens, heads, width]."""
    repeats = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        length_q, length_k = int(q1 - q0), int(k1 - k0)
        mask = torch.ones(length_q, length_k, dtype=torch.bool).tril(length_k - length_q)
        keys, values = (each[k0:k1].repeat_interleave(repeats, 1).transpose(0, 1) for each in (key, value))
        part = torch.nn.functional.scaled_dot_product_attention(
            query[q0:q1].transpose(0, 1), keys, values, attn_mask=mask, scale=softmax_scale
        )
        out[q0:q1] = part.transpose(0, 1)
    return out
