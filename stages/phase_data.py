"""What RUN hands to EVAL, made fit for the wire: nothing that an agent wrote may end its job without a reward.

Halves of surrogate pairs, which JSON can spell and no encoding can, are replaced. Data beyond the limit raise
`SandboxLimitExceeded`, which is the agent's own failure and earns 0.0. Handlers keep below the limit by themselves, so
that EVAL can say what was wrong.
"""

from __future__ import annotations

from typing import Any

from ..errors import SandboxLimitExceeded
from ..wire import codec

DATA_LIMIT_BYTES = 3 * codec.HEADER_LIMIT_BYTES // 8
"""Most bytes of RUN's data on the wire. The rest of an event's limit is for its notes, metrics and steps."""


def sendable(text: str) -> str:
    """Return a text as UTF-8 can write it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def passed_on(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data that RUN made as EVAL will get them.

    Raises:
        SandboxLimitExceeded: they are too large.
        MalformedMessage: they are no plain data.
    """
    data = _sendable(data)
    size = len(codec.pack(data))
    if size > DATA_LIMIT_BYTES:
        message = f"the agent's output takes {size} bytes on the wire; at most {DATA_LIMIT_BYTES} are passed on to EVAL"
        raise SandboxLimitExceeded(message, limit="output_bytes")
    return data


def _sendable(value: Any) -> Any:
    match value:
        case str():
            return sendable(value)
        case list() | tuple():
            return [_sendable(each) for each in value]
        case dict():
            return {_sendable(name): _sendable(each) for name, each in value.items()}
    return value
