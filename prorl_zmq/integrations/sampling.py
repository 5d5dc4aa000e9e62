"""Converts a framework's sampling parameters to `Sampling`, and rejects unsupported ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import InvalidJob
from ..wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

MEANS_NOTHING_HERE: dict[str, tuple[object, ...]] = {
    "logprobs": (None, 0, 1),  # the sampled token's is always returned
    "min_tokens": (None, 0, 1),  # every turn has at least one token
    "n": (None, 1),
    "repetition_penalty": (None, 1.0),
    "frequency_penalty": (None, 0.0),
    "presence_penalty": (None, 0.0),
    "skip_special_tokens": (None, True, False),  # for texts, which are not returned
    "spaces_between_special_tokens": (None, True, False),
    "include_stop_str_in_output": (None, True),
    "additional_kwargs": (None, {}),
}
"""Unsupported parameters, with the values that have no effect here."""


def sampling_of(parameters: Mapping[str, Any]) -> Sampling:
    """Read sampling parameters under vLLM's names.

    Raises:
        InvalidJob: one is unsupported, or has an invalid value; `field` names it.
    """
    known: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in Sampling.__struct_fields__:
            if value is not None:
                known[name] = value
        elif value not in MEANS_NOTHING_HERE.get(name, ()):
            raise InvalidJob(f"the sampling parameter {name} = {value!r} is not known here", field=f"sampling.{name}")
    if known.get("top_k") == -1:
        known["top_k"] = 0  # both mean all tokens
    if isinstance(known.get("stop"), str):
        known["stop"] = (known["stop"],)
    try:
        return msgspec.convert(known, Sampling)
    except msgspec.ValidationError as error:
        raise InvalidJob(f"sampling parameters: {error}", field="sampling") from None
