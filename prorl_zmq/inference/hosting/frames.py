"""The envelopes and frames of an engine host's requests and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...data.records import array_form
from ...errors import EngineFailed, MalformedMessage
from ...wire.messages.engines import Generated

if TYPE_CHECKING:
    from collections.abc import Sequence

    import zmq
    from numpy.typing import NDArray

    from ...wire.messages.engines import WeightUpdate
    from ...wire.sockets import Frame
    from ..engine import Generation

ENVELOPES_LIMIT = 8
"""Most connections that get the answer to one request."""


def add_envelope(envelopes: list[Sequence[Frame]], envelope: Sequence[Frame]) -> None:
    """Add the envelope of a repeated request to those that get its answer, of which the latest are kept.

    A client repeats a request over a new connection, which does not tell which one is dead: after a pause of this
    process, what came over the old one may be read last.
    """
    envelopes.append(envelope)
    del envelopes[:-ENVELOPES_LIMIT]


def token_array(frame: bytes | zmq.Frame) -> NDArray[np.int32]:
    """Return a frame as int32 [N].

    Raises:
        MalformedMessage: its size is not a multiple of 4 bytes.
    """
    data = frame_bytes(frame)
    if len(data) % 4:
        raise MalformedMessage(f"token ids are int32, 4 bytes each; a frame of {len(data)} bytes holds something else")
    return np.frombuffer(data, np.int32)


def frame_bytes(frame: bytes | zmq.Frame) -> bytes:
    return frame if isinstance(frame, bytes) else frame.bytes


def generated(request_id: str, done: Generation, again_tokens: int, parked_s: float) -> tuple[Generated, list[Frame]]:
    """Return the answer to a request, and its arrays."""
    header = Generated(
        request_id,
        finish_reason=done.finish_reason,
        spans=done.spans,
        cached_tokens=done.cached_tokens,
        again_tokens=again_tokens,
        parked_s=parked_s,
        arrays=tuple(array_form(name, one) for name, one in done.records.items()),
    )
    arrays: list[Frame] = [done.token_ids.tobytes(), done.logprobs.tobytes()]
    return header, arrays + [one.reshape(-1).view(np.uint8).data for one in done.records.values()]


def decoded_info(request: WeightUpdate) -> dict[str, Any]:
    """Return what vLLM's method gets, with the rank of the engine's first process.

    Raises:
        EngineFailed: it is no JSON object.
    """
    try:
        info = msgspec.json.decode(request.info or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineFailed(f"the info of a transfer is no JSON object: {error}", refused=True) from error
    if isinstance(info.get("rank_offset"), int) and request.receivers:
        info["rank_offset"] += request.receivers[0].rank - 1
    return info
