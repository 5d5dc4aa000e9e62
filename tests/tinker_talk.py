"""Tinker's sampling client against a gateway, in a process of its own: `tinker_talk.py URL KEY EXAMPLE`; prints JSON.

EXAMPLE is the code of the documentation, which is run first.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import tinker
from tinker import ModelInput, SamplingParams, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable

MANY = 200
HI = ModelInput.from_ints([5, 6])
TEXT = list(range(65, 85))
TOP = 3


def sequences(sampler: Any, count: int = 1, prompt: Any = HI, **params: Any) -> list[dict[str, Any]]:
    sampling = SamplingParams(**{"max_tokens": 8, **params})
    found = sampler.sample(prompt, count, sampling).result().sequences
    return [
        {"id": one.sequence_id, "tokens": list(one.tokens), "logprobs": list(one.logprobs), "stop": one.stop_reason}
        for one in found
    ]


def refusal(ask: Callable[[], Any]) -> list[str]:
    try:
        ask()
    except tinker.TinkerError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def listed(values: Any) -> list[Any]:
    """Give a prompt's values as JSON, without NaN."""
    return [None if one is None or one != one else one for one in values]


def scores(sampler: Any) -> dict[str, Any]:
    text, ends = ModelInput.from_ints(TEXT), SamplingParams(max_tokens=4)
    whole = {"include_prompt_logprobs": True, "topk_prompt_logprobs": TOP, "topk_sample_logprobs": TOP}
    reply = sampler.sample(text, 2, ends, **whole).result()
    last = sampler.sample(text, 1, ends, **{**whole, "prompt_logprobs_last_n": 2}).result()
    cells = np.array([[-1, (7 * row) % 256] for row in range(len(TEXT) - 1)])
    dense = TensorData(data=cells.ravel(), dtype="int64", shape=list(cells.shape))
    targets = sampler.sample(text, 1, ends, target_prompt_logprobs=dense).result()
    rows, columns = [0, 2, *[3] * (len(TEXT) - 2)], [0, 499, 7]
    sparse = TensorData(
        data=[TEXT[1], 200, TEXT[3]],
        dtype="int64",
        shape=[len(TEXT) - 1, 500],
        sparse_crow_indices=rows,
        sparse_col_indices=columns,
    )
    listed_only = sampler.sample(text, 1, ends, include_prompt_logprobs=True, target_prompt_logprobs=sparse).result()
    many = TensorData(data=np.repeat(np.arange(10), 10 * len(TEXT) - 10), dtype="int64", shape=[len(TEXT) - 1, 100])
    layout = listed_only.target_prompt_logprobs
    return {
        "text": TEXT,
        "computed": listed(sampler.compute_logprobs(text).result()),
        "last two": listed(sampler.compute_logprobs(text, prompt_logprobs_last_n=2).result()),
        "prompt": listed(reply.prompt_logprobs),
        "top of the prompt": reply.topk_prompt_logprobs,
        "top of the last two": last.topk_prompt_logprobs,
        "replies": [[list(one.tokens), list(one.logprobs), one.topk_logprobs] for one in reply.sequences],
        "cells": cells.tolist(),
        "targets": targets.target_prompt_logprobs.to_numpy().reshape(cells.shape).tolist(),
        "targets only": targets.prompt_logprobs,
        "sparse": [
            [float(one) for one in layout.data],
            layout.shape,
            layout.sparse_crow_indices,
            layout.sparse_col_indices,
        ],
        "too many targets": refusal(lambda: sampler.sample(text, 1, ends, target_prompt_logprobs=many).result()),
        "wrong rows": refusal(
            lambda: sampler.sample(HI, 1, ends, target_prompt_logprobs=dense).result(),
        ),
        "wrong last": refusal(lambda: sampler.compute_logprobs(text, prompt_logprobs_last_n=len(TEXT)).result()),
        "alternatives": refusal(lambda: sampler.sample(text, 1, ends, prompt_alt_tokens_k=1).result()),
    }


def main(url: str, key: str, example: str) -> None:
    warnings.simplefilter("ignore")
    shown: dict[str, Any] = {}
    exec(example, shown)
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{key}")

    def model(**named: str) -> Any:
        return service.create_sampling_client(**named).result()

    policy, teacher = model(base_model="policy"), model(model_path="tinker://here/teacher")
    futures = [(policy, teacher)[i % 2].sample(HI, 1, SamplingParams(max_tokens=8)) for i in range(MANY)]
    told = {
        "example": [list(one.tokens) for one in shown["reply"].sequences],
        "two": sequences(policy, 2),
        "short": sequences(policy, max_tokens=2),
        "teacher": sequences(teacher),
        "by engine": sequences(model(base_model="scripted")),
        "stops": [sequences(policy, stop=stop) for stop in (None, [], [7], "e")],
        "many": [list(future.result().sequences[0].tokens) for future in futures],
        "models": sorted(one.model_name for one in service.get_server_capabilities().supported_models),
        "unknown": refusal(lambda: model(base_model="nobody")),
        "version": refusal(lambda: model(model_path="tinker://here/policy@3")),
        "current version": sequences(model(model_path="tinker://here/policy@0")),
        "scores": scores(model(model_path="tinker://here/scorer@5")),
        "scoring": refusal(lambda: policy.compute_logprobs(HI).result()),
        "wrong id": refusal(lambda: sequences(policy, prompt=ModelInput.from_ints([10**6]))),
    }
    print(json.dumps(told))
    service.holder.close()


main(*sys.argv[1:])
