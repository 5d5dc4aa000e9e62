"""The arrays of a generation's records: how engines make them, and checks of those that another engine made.

`wire.records` defines their names, shapes and meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EngineFailed
from ..wire.records import EXPERTS, NO_LOGPROB, NO_TOKEN, TOP_LOGPROBS, Recorded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..wire.messages.jobs import Sampling
    from .engine import EngineDescription, Generation, Wanted

Arrays = dict[str, "NDArray[Any]"]
_DTYPES = {
    "top_ids": "int32",
    TOP_LOGPROBS: "float32",
    "mask_ids": "int32",
    "mask_counts": "int32",
    EXPERTS: "uint8 or uint16",
}
_MASK_GAP = 1e-3


def asked_records(wanted: Wanted, prompt_tokens: int, sampling: Sampling, description: EngineDescription) -> Recorded:
    """Return what a request wants recorded.

    Raises:
        EngineFailed: (`refused`) a form is invalid, the engine does not offer a record, the sampling leaves nothing to
            record, or more rows are known than the prompt has.
    """
    try:
        asked = Recorded.parse(wanted.record)
    except ValueError as error:
        raise EngineFailed(str(error), refused=True) from None
    missing = [name for name in asked.names if name not in description.records]
    problem = asked.conflict(sampling)
    if missing:
        problem = f"{description.model} as it was started does not give the records {', '.join(missing)}"
    elif description.vocabulary and asked.top > description.vocabulary:
        problem = f"top_logprobs:{asked.top} is more than the vocabulary of {description.vocabulary}"
    elif asked.top > description.top_limit:
        problem = f"{description.model} as it was started gives at most top_logprobs:{description.top_limit}"
    elif not 0 <= wanted.rows_known <= prompt_tokens:
        problem = f"{wanted.rows_known} rows of experts cannot be known of a prompt of {prompt_tokens} tokens"
    if problem:
        raise EngineFailed(problem, refused=True)
    return asked


def top_arrays(ids: NDArray[Any], logprobs: NDArray[Any]) -> Arrays:
    """Return the record of candidates, [G, K] each in descending order, of which some may be impossible (-inf)."""
    possible = logprobs > NO_LOGPROB
    return {
        "top_ids": np.where(possible, ids, NO_TOKEN).astype(np.int32),
        TOP_LOGPROBS: np.where(possible, logprobs, NO_LOGPROB).astype(np.float32),
    }


def mask_arrays(supports: Sequence[Sequence[int] | NDArray[Any]]) -> Arrays:
    """Return the record of the supports of all generated tokens."""
    flat = np.concatenate([np.zeros(0, np.int32), *(np.asarray(each, np.int64) for each in supports)])
    return {"mask_ids": flat.astype(np.int32), "mask_counts": np.array([len(each) for each in supports], np.int32)}


def narrow_experts(routes: NDArray[Any], experts: int) -> NDArray[Any]:
    """Return routes, integers [R, layers, k], in the type for that number of experts: uint8 up to 256, else uint16."""
    return routes.astype(np.uint8 if experts <= 256 else np.uint16)


def rows_wanted(routes: NDArray[Any] | None, first: int, rows_known: int) -> Arrays:
    """Return the record of routes whose first row is that of token `first`, without the rows that are known already.

    Without any row, or with rows missing between the known ones and `first`, the record is left out.
    """
    if routes is None or first > rows_known or len(routes) <= rows_known - first:
        return {}
    return {EXPERTS: routes[rows_known - first :]}


def joined_records(parts: Sequence[Generation]) -> Arrays:
    """Join the records of consecutive parts of one turn, those without a token included.

    Each part's experts begin where those of the parts before it end. A record of generated tokens that a part with
    tokens lacks is left out, since its rows would have no place.
    """
    found: Arrays = {}
    for name in dict.fromkeys(name for part in parts for name in part.records):
        if name == EXPERTS or all(name in part.records or not len(part.token_ids) for part in parts):
            found[name] = np.concatenate([part.records[name] for part in parts if name in part.records])
    return found


def check_records(
    records: Mapping[str, NDArray[Any]],
    record: Sequence[str],
    token_ids: NDArray[np.int32],
    *,
    positions: int,
    vocabulary: int = 0,
) -> None:
    """Check the arrays of a generation's records. A record that was asked for may be missing.

    Args:
        records: of the generation.
        record: what was asked for.
        token_ids: int32 [G], the generated ones.
        positions: most rows of routes: tokens of the prompt and generated ones, less `rows_known` and the last one.
        vocabulary: ids must be below this; 0: not known.

    Raises:
        EngineFailed: an array was not asked for, lacks its pair, or has another type or shape; an id is outside the
            vocabulary; a drawn token is missing in its mask; or a log-prob is no logarithm of a probability.
    """
    asked, count = Recorded.parse(record), len(token_ids)
    shapes: dict[str, tuple[int, ...] | None] = {}
    if asked.top:
        shapes |= {"top_ids": (count, asked.top), TOP_LOGPROBS: (count, asked.top)}
    if asked.mask:
        shapes |= {"mask_ids": None, "mask_counts": (count,)}
    if asked.experts:
        shapes[EXPERTS] = None
    for name, array in records.items():
        if name not in shapes:
            raise EngineFailed(f"the engine gave a record {name} that was not asked for")
        if str(array.dtype) not in _DTYPES[name].split(" or "):
            raise EngineFailed(f"the engine gave {name} of type {array.dtype}, not {_DTYPES[name]}")
        expected = shapes[name]
        if expected is not None and array.shape != expected:
            raise EngineFailed(f"the engine gave {name} of shape {list(array.shape)}, not {list(expected)}")
    for pair in (("top_ids", TOP_LOGPROBS), ("mask_ids", "mask_counts")):
        if (pair[0] in records) != (pair[1] in records):
            raise EngineFailed(f"the engine gave only one of {pair[0]} and {pair[1]}")
    limit = vocabulary or 2**31
    if "top_ids" in records:
        _check_top(records["top_ids"], records[TOP_LOGPROBS], limit)
    if "mask_ids" in records:
        _check_mask(records["mask_ids"], records["mask_counts"], token_ids, limit)
    if EXPERTS in records:
        routes = records[EXPERTS]
        if routes.ndim != 3 or len(routes) > positions:
            raise EngineFailed(
                f"the engine gave experts of shape {list(routes.shape)}, not [rows, layers, k] of at most {positions} "
                "rows"
            )


def _check_top(ids: NDArray[Any], logprobs: NDArray[Any], limit: int) -> None:
    padded = ids == NO_TOKEN
    if bool(np.any((ids < NO_TOKEN) | (ids >= limit))):
        raise EngineFailed(f"the engine gave a top_ids outside of 0 to {limit - 1}")
    # NaN fails every comparison.
    if not bool(np.all(np.where(padded, logprobs == NO_LOGPROB, (logprobs <= _MASK_GAP) & (logprobs > NO_LOGPROB)))):
        raise EngineFailed("the engine gave a top_logprobs that is not a logarithm of a probability")
    if bool(np.any(np.diff(logprobs, axis=1) > 0)):
        raise EngineFailed("the engine gave top_logprobs that are not in descending order")


def _check_mask(ids: NDArray[Any], counts: NDArray[Any], token_ids: NDArray[np.int32], limit: int) -> None:
    if ids.ndim != 1 or bool(np.any(counts < 1)) or int(counts.sum(dtype=np.int64)) != len(ids):
        raise EngineFailed(f"the engine gave {len(ids)} mask_ids with mask_counts that do not add up to them")
    if bool(np.any((ids < 0) | (ids >= limit))):
        raise EngineFailed(f"the engine gave a mask_ids outside of 0 to {limit - 1}")
    owners = np.repeat(np.arange(len(counts)), counts)
    drawn = np.zeros(len(counts), np.bool_)
    drawn[owners[ids == token_ids[owners]]] = True
    if not drawn.all():
        missing = int(np.argmin(drawn))
        raise EngineFailed(
            f"the token {token_ids[missing]} that was drawn at {missing} is missing in its sampling mask"
        )
