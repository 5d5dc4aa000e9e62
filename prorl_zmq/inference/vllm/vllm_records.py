"""The records of vLLM in this process: which ones its configuration gives, how a request asks for them, their arrays.

`top_logprobs` are `SamplingParams.logprobs`, up to `--max-logprobs`. Experts need `--enable-return-routed-experts`, and
sampling masks `--return-sampling-mask`; vLLM has both only with its Model Runner V2, which runs on GPUs. Without that
flag masks are read from the log-probs of the whole vocabulary if the engine may give them, `--max-logprobs -1` with
processed log-probs: exact, but slow with a large vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import EngineFailed
from ...wire.records import EXPERTS, RECORD_TOP_LIMIT, SAMPLING_MASK, TOP_LOGPROBS, Recorded
from ..records import mask_arrays, rows_wanted, top_arrays

if TYPE_CHECKING:
    from ..engine import Wanted
    from ..records import Arrays

ALL = -1
"""vLLM's number for the log-probs of the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class VllmRecords:
    """What a running vLLM can record."""

    most: int
    """The largest number of `top_logprobs`; `ALL`: the vocabulary."""
    masks: bool
    """Whether the engine returns sampling masks itself."""
    processed: bool
    """Whether log-probs are those after truncation."""
    experts: bool
    no_experts: str = ""
    """Why it does not give them."""

    @classmethod
    def of(cls, config: Any) -> VllmRecords:
        """Read the configuration, a `VllmConfig`; options that this version of vLLM lacks are off."""
        model = config.model_config
        no_experts = "vLLM was started without --enable-return-routed-experts, which needs a GPU"
        if not getattr(model, "is_moe", True):
            no_experts = "its model is dense"
        elif not config.cache_config.enable_prefix_caching:
            no_experts = "vLLM was started with --no-enable-prefix-caching, and experts are stored with the cache"
        return cls(
            model.max_logprobs,
            bool(getattr(model, "return_sampling_mask", False)),
            model.logprobs_mode == "processed_logprobs",
            bool(getattr(getattr(config, "aux_output_config", None), "enable_return_routed_experts", False)),
            no_experts,
        )

    @property
    def names(self) -> tuple[str, ...]:
        given = {
            TOP_LOGPROBS: self.most != 0,
            SAMPLING_MASK: self.masks or (self.processed and self.most == ALL),
            EXPERTS: self.experts,
        }
        return tuple(name for name, on in given.items() if on)

    @property
    def unrecorded(self) -> dict[str, str]:
        """Why the other records are not given."""
        why = {
            TOP_LOGPROBS: "vLLM was started with --max-logprobs 0",
            SAMPLING_MASK: "vLLM needs --return-sampling-mask, or --max-logprobs -1 with --logprobs-mode "
            "processed_logprobs",
            EXPERTS: self.no_experts,
        }
        return {name: reason for name, reason in why.items() if name not in self.names}

    @property
    def top_limit(self) -> int:
        return RECORD_TOP_LIMIT if self.most == ALL else max(1, min(self.most, RECORD_TOP_LIMIT))

    def parameters(self, asked: Recorded, wanted: Wanted) -> dict[str, int]:
        """Return the sampling parameters that ask for records.

        Raises:
            EngineFailed: (`refused`) more log-probs were asked for than the engine gives.
        """
        if self.most != ALL and asked.top > self.most:
            raise EngineFailed(
                f"top_logprobs:{asked.top} is more than this vLLM gives; start it with --max-logprobs {asked.top}",
                refused=True,
            )
        whole = asked.mask and not self.masks
        start = {"routed_experts_prompt_start": wanted.rows_known} if asked.experts else {}
        return {"logprobs": ALL if whole else asked.top, **start}

    def arrays(self, completion: Any, asked: Recorded, wanted: Wanted, prompt_tokens: int) -> Arrays:
        """Return the records in vLLM's output of one prompt."""
        found: Arrays = {}
        count = len(completion.token_ids)
        if asked.top or (asked.mask and not self.masks):
            flat = completion.logprobs
            # The drawn token, then the likeliest ones in descending order. Without a token nothing tells their number.
            width = len(flat.token_ids) // count if count else 1 + asked.top
            ids = np.array(flat.token_ids, np.int32).reshape(count, width)[:, 1:]
            logprobs = np.array(flat.logprobs, np.float32).reshape(count, width)[:, 1:]
            if asked.top:
                found |= top_arrays(ids[:, : asked.top], logprobs[:, : asked.top])
            if asked.mask and not self.masks:
                found |= mask_arrays([row[finite] for row, finite in zip(ids, np.isfinite(logprobs), strict=True)])
        if asked.mask and self.masks and completion.sampling_mask is not None:
            found |= mask_arrays(completion.sampling_mask.token_ids)
        if asked.experts and completion.routed_experts is not None:
            # An update may have ended the turn when its last token had been an input already.
            rows = completion.routed_experts[: prompt_tokens + count - 1 - wanted.rows_known]
            found |= rows_wanted(rows, wanted.rows_known, wanted.rows_known)
        return found
