"""The reference: what transformers says of tokens that an engine sampled; used by scripts in vLLM's Python."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_zmq.data.scores import Scores
    from prorl_zmq.inference.engine import Generation
    from prorl_zmq.wire.messages.jobs import Sampling


class Reference:
    """Runs models by transformers, in float32.

    Args:
        folders: of the models, by weight version.
    """

    def __init__(self, folders: dict[int, Path]) -> None:
        torch.set_num_threads(1)
        self._models = {
            version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for version, folder in folders.items()
        }

    def error(self, prompt: Sequence[int], generation: Generation, sampling: Sampling) -> float:
        """Give the largest difference of a generation's log-probs from those of its spans' own weights."""
        ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
        worst = 0.0
        for span in generation.spans:
            with torch.inference_mode():
                logits = self._models[span.weight_version](ids).logits[0]
            rows = logits[len(prompt) - 1 + span.start : len(prompt) - 1 + span.end]
            drawn = torch.from_numpy(generation.token_ids[span.start : span.end].astype(np.int64))
            expected = sampled_from(rows, sampling).gather(1, drawn[:, None])[:, 0].numpy()
            worst = max(worst, float(np.abs(expected - generation.logprobs[span.start : span.end]).max()))
        return worst

    def scores_error(self, token_ids: Sequence[int], scores: Scores) -> float:
        """Give the largest difference of a text's scores from those of version 0, computed in float64."""
        with torch.inference_mode():
            wide = copy.deepcopy(self._models[0]).double()
            expected = wide(torch.tensor([list(token_ids)])).logits[0, :-1].log_softmax(-1).numpy()
        if not len(expected):
            return float(np.abs(scores.logprobs).max(initial=0.0))
        own = np.take_along_axis(expected, np.array(token_ids[1:])[:, None], 1)[:, 0]
        top_ids, top_logprobs = scores.top_ids[1:], scores.top_logprobs[1:]
        likeliest = -np.sort(-expected, 1)[:, : top_ids.shape[1]]
        named = np.take_along_axis(expected, top_ids.astype(np.int64), 1)
        gaps = (scores.logprobs[1:] - own, top_logprobs - likeliest, top_logprobs - named)
        return max(float(np.abs(gap).max(initial=0.0)) for gap in gaps)


def sampled_from(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Give the log-probs, [N, V], of the distributions that vLLM draws from, written anew from its documentation."""
    if sampling.temperature == 0:
        return torch.log_softmax(logits, -1)
    logits = logits / sampling.temperature
    likely = torch.softmax(logits, -1)
    logits = logits.masked_fill(likely < sampling.min_p * likely.max(-1, keepdim=True).values, -torch.inf)
    if sampling.top_k:
        least = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    ordered, order = torch.softmax(logits, -1).sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
    logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return torch.log_softmax(logits, -1)
