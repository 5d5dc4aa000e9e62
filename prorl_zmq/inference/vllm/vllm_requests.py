"""What vLLM is asked for, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import EngineFailed
from ...wire.messages.engines import VersionSpan
from ..engine import FINISH_REASONS, Generation
from ..prompt_logprobs import scores_by_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...data.scores import Scores
    from ...wire.messages.jobs import Sampling
    from ..records import Arrays


def sampling_parameters(sampling: Sampling, stop_token_ids: Sequence[int], room: int, records: dict[str, int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=min(sampling.max_tokens, room),
        stop=list(sampling.stop),
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop text may be in one
        output_kind=RequestOutputKind.FINAL_ONLY,
        **records,  # `logprobs` is 0 if only those of the drawn tokens are asked for
    )


def scoring_parameters(top: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=top,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scores_of(flat: Any, token_ids: NDArray[np.int32], top: int) -> Scores:
    if flat is None or len(flat) != len(token_ids):
        raise EngineFailed("vLLM gave no log-probs of the text")
    counts = [end - start for start, end in zip(flat.start_indices[1:], flat.end_indices[1:], strict=True)]
    return scores_by_rank(token_ids, top, counts, (flat.token_ids, flat.logprobs, flat.ranks))


def generation_of(output: Any, records: Arrays) -> Generation:
    completion = output.outputs[0]
    finish_reason = FINISH_REASONS.get(completion.finish_reason)
    if finish_reason is None:
        raise EngineFailed(f"vLLM ended a turn with {completion.finish_reason}: {completion.stop_reason}")
    # Flat: all log-probs of all positions in one list; if a position has several, the drawn token's comes first.
    flat = completion.logprobs
    logprobs = np.array(flat.logprobs, np.float32)
    if len(logprobs) != len(flat):
        logprobs = logprobs[flat.start_indices]
    return Generation(
        np.array(completion.token_ids, np.int32),
        logprobs,
        tuple(VersionSpan(int(span.version), span.start, span.end) for span in completion.weight_versions or ()),
        finish_reason,
        output.num_cached_tokens or 0,
        records,
    )
