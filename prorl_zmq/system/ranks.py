"""Processes of a distributed trainer: only rank 0 talks to the service; its errors are raised on every rank.

Needs PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from ..errors import ErrorInfo, InternalError, ProrlError, from_info

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Part = TypeVar("Part")


def ranks() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    return distributed.get_rank() if ranks() > 1 else 0


def gather(value: Part) -> list[Part]:
    """Return all ranks' values on rank 0; elsewhere an empty list."""
    if ranks() == 1:
        return [value]
    values: list[Any] = [None] * ranks()
    distributed.gather_object(value, values if rank() == 0 else None)
    return values if rank() == 0 else []


def scatter(make: Callable[[], Sequence[Part]]) -> Part:
    """Return this rank's part of what `make` returns on rank 0: a sequence with one part per rank."""
    failure: Exception | None = None
    parts: Sequence[Any] = [None] * ranks()
    if rank() == 0:
        try:
            parts = make()
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            failure = error
    raise_everywhere(failure)
    if ranks() == 1:
        return parts[0]  # type: ignore[no-any-return]
    mine: list[Any] = [None]
    distributed.scatter_object_list(mine, list(parts) if rank() == 0 else None)
    return mine[0]  # type: ignore[no-any-return]


def raise_everywhere(failure: Exception | None) -> None:
    """Raise rank 0's failure on all ranks; all ranks must call this."""
    if ranks() > 1:
        told: list[ErrorInfo | str] = [failure.info() if isinstance(failure, ProrlError) else repr(failure or "")]
        distributed.broadcast_object_list(told)
        if isinstance(told[0], ErrorInfo):
            failure = failure or from_info(told[0])
        elif told[0] != repr(""):
            failure = failure or InternalError(f"rank 0 failed: {told[0]}")
    if failure is not None:
        raise failure
