"""The records in servers' answers: JSON lists, and arrays in base64."""

from __future__ import annotations

import base64
import binascii
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import EngineFailed
from ...wire.records import NO_LOGPROB, NO_TOKEN
from ..records import mask_arrays, narrow_experts, top_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..records import Arrays


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """The shape of a mixture's routes."""

    layers: int
    """All of them, also those without experts."""
    chosen: int
    """Experts of a token in a layer."""
    experts: int

    @classmethod
    def read(cls, folder: str) -> MixtureShape | None:
        """Read the config.json of a model's folder; None: it is not readable, or the model is no mixture."""
        try:
            config = json.loads((Path(folder) / "config.json").read_bytes()) if folder else {}
            config = config.get("text_config", config)
            counts = [config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts")]
            experts = next(count for count in counts if count)
            numbers = config["num_hidden_layers"], config["num_experts_per_tok"], experts
        except (OSError, ValueError, AttributeError, KeyError, StopIteration):
            return None
        return cls(*numbers) if all(isinstance(number, int) and number > 0 for number in numbers) else None


def top_of(rows: Sequence[Sequence[tuple[int, float | None]]], top: int) -> Arrays:
    """Return the `top` likeliest of each generated token's candidates, which are pairs of an id and a log-prob.

    Raises:
        EngineFailed: a token has too few candidates, or an id is not an int32.
    """
    ids = np.full((len(rows), top), NO_TOKEN, np.int64)
    logprobs = np.full((len(rows), top), NO_LOGPROB)
    for number, entries in enumerate(rows):
        if len(entries) < top:
            raise EngineFailed(f"the server gave {len(entries)} of the {top} likeliest tokens that were asked for")
        valued = {token: NO_LOGPROB if logprob is None else logprob for token, logprob in entries}
        best = sorted(valued.items(), key=lambda entry: -entry[1])[:top]
        ids[number, : len(best)] = [_id(token) for token, _ in best]
        logprobs[number, : len(best)] = [logprob for _, logprob in best]
    return top_arrays(ids, logprobs)


def mask_of(supports: Sequence[Sequence[int]]) -> Arrays:
    """Return the record of supports.

    Raises:
        EngineFailed: an id is not an int32.
    """
    for support in supports:
        if support:
            _id(max(support, key=abs))
    return mask_arrays(supports)


def decoded_npy(text: str) -> NDArray[Any]:
    """Decode vLLM's routes: base64 of a .npy file.

    Raises:
        EngineFailed: it is something else, or not unsigned integers [rows, layers, k].
    """
    try:
        array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, OSError, EOFError) as error:
        raise EngineFailed(f"the server gave routed_experts that are no .npy file in base64: {error}") from None
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.dtype.kind not in "iu":
        raise EngineFailed("the server gave routed_experts that are not integers of shape [rows, layers, k]")
    if array.dtype in (np.uint8, np.uint16):
        return array
    return _narrowed(array, 2**16)


def decoded_rows(text: str, shape: MixtureShape) -> NDArray[Any]:
    """Decode SGLang's routes: base64 of int32, whose shape is the model's.

    Raises:
        EngineFailed: it is something else, or not whole rows.
    """
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
        rows = flat.reshape(-1, shape.layers, shape.chosen)
    except (binascii.Error, ValueError) as error:
        raise EngineFailed(
            f"the server gave routed_experts that are not rows of {shape.layers} layers with {shape.chosen} experts: "
            f"{error}"
        ) from None
    return _narrowed(rows, shape.experts)


def _narrowed(routes: NDArray[Any], experts: int) -> NDArray[Any]:
    if routes.size and not 0 <= routes.min() <= routes.max() < experts:
        raise EngineFailed(f"the server gave routed_experts outside of 0 to {experts - 1}")
    return narrow_experts(routes, experts)


def _id(token: int) -> int:
    if abs(token) >= 2**31:
        raise EngineFailed(f"the server gave the token id {token}, which no vocabulary holds")
    return token
