"""Tinker's sampling client against a gateway, in a process of its own: `tinker_talk.py URL KEY EXAMPLE`; prints JSON.

EXAMPLE is the code of the documentation, which is run first.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

import tinker
from tinker import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

MANY = 200
HI = ModelInput.from_ints([5, 6])


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
        "scoring": refusal(lambda: policy.compute_logprobs(HI).result()),
        "wrong id": refusal(lambda: sequences(policy, prompt=ModelInput.from_ints([10**6]))),
    }
    print(json.dumps(told))
    service.holder.close()


main(*sys.argv[1:])
