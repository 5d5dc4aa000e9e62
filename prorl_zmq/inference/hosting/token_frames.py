"""Frames that an engine host receives, as bytes and as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...errors import MalformedMessage

if TYPE_CHECKING:
    import zmq
    from numpy.typing import NDArray


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
