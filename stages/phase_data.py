"""Make a phase's return value fit for the wire: no text of an agent may end its job without a reward.

Lone surrogates, which JSON can spell and no encoding can, are replaced. Data beyond the limit raise
`SandboxLimitExceeded`, the agent's own failure, which earns 0.0. Handlers limit their data themselves, so that EVAL can
say what was wrong.
"""

from __future__ import annotations

from typing import Any

from ..errors import HandlerFailed, MalformedMessage, SandboxLimitExceeded
from ..wire import codec
from ..wire.messages.jobs import Phase
from .handler import Evaluation

DATA_LIMIT_BYTES = 3 * codec.HEADER_LIMIT_BYTES // 8
"""Most bytes of RUN's data on the wire. The rest of an event's limit is for its notes, metrics and steps."""


def sendable(text: str) -> str:
    """Return a text as UTF-8 can write it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def checked_data(phase: Phase, data: Any) -> dict[str, Any]:
    """Return what INIT or RUN returned.

    Raises:
        HandlerFailed: it is no dict.
    """
    if not isinstance(data, dict):
        following = Phase.RUN if phase == Phase.INIT else Phase.EVAL
        raise HandlerFailed(
            f"{phase} returned {_named(data)}; it must return a dict with what {following} needs, which may be empty"
        )
    return data


def passed_on(data: Any) -> dict[str, Any]:
    """Return the data that RUN made as EVAL will get them.

    Raises:
        SandboxLimitExceeded: they are too large.
        HandlerFailed: they are no dict of plain data.
    """
    sendable_data: dict[str, Any] = _sendable(checked_data(Phase.RUN, data))
    try:
        size = len(codec.pack(sendable_data))
    except MalformedMessage as error:
        place, value = _misfit(sendable_data, "the dict")
        raise HandlerFailed(
            f"run returned a dict that cannot be passed on to eval: {place} is {_named(value)}; plain data are None, "
            "bool, int, float, str, bytes, and lists and dicts of these"
        ) from error
    if size > DATA_LIMIT_BYTES:
        message = f"the agent's output takes {size} bytes on the wire; at most {DATA_LIMIT_BYTES} are passed on to EVAL"
        raise SandboxLimitExceeded(message, limit="output_bytes")
    return sendable_data


def checked_evaluation(made_by: str, evaluation: Any) -> Evaluation:
    """Return what EVAL found.

    Raises:
        HandlerFailed: it is something else, such as a number.
    """
    if not isinstance(evaluation, Evaluation):
        raise HandlerFailed(
            f"{made_by} returned {_named(evaluation)}; it must return an Evaluation, such as Evaluation(reward=1.0)"
        )
    return evaluation


def _named(value: Any) -> str:
    return "None" if value is None else f"{value!r:.100} ({type(value).__name__})"


def _misfit(value: Any, place: str) -> tuple[str, Any]:
    """Return the innermost part of a value that cannot be packed, and where it is."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, part in parts:
        try:
            codec.pack(part)
        except MalformedMessage:
            return _misfit(part, f"{place}[{name!r}]")
    return place, value


def _sendable(value: Any) -> Any:
    match value:
        case str():
            return sendable(value)
        case list() | tuple():
            return [_sendable(each) for each in value]
        case dict():
            return {_sendable(name): _sendable(each) for name, each in value.items()}
    return value
