"""A server's calls for new weights, which it reads from a folder visible to it.

An update calls `abort_all`, `pause` and `name_loading` before `load`, and `resume` after it, unless the load may still
be running. The engine decides the order, and handles failures. If the trainer sends the weights to the server itself,
`set_version` replaces `load`. vLLM has these calls only in its development mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import EngineFailed, InvalidWeights
from ..engine import PAUSES
from .answers import LOADING_WORD, decoded

if TYPE_CHECKING:
    from pathlib import Path

    from ...wire.messages.engines import UpdateMode
    from .connections import Answer, Connections

CALL_S = 30.0
DRAIN_S = 1800.0
"""Longest wait for generations to end by themselves."""
LOAD_S = 1800.0
"""Longest reading of new weights: large models come from a network."""

_ABSENT = (403, 404, 405)


class WeightUpdates(ABC):
    """One server's calls for new weights. Each raises `EngineFailed` if the server lacks it, or fails."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def check(self) -> None:  # noqa: B027
        """Raise unless the server has these calls; with `missing=True`, it never will."""

    @abstractmethod
    async def abort_all(self) -> None:
        """End the running generations; each is answered with its tokens so far."""

    async def pause(self, mode: UpdateMode) -> None:  # noqa: B027
        """Stop between two tokens; `mode` decides about running generations."""

    async def name_loading(self) -> None:  # noqa: B027
        """Have the server report that it takes new weights, for a later engine host to find if this one dies."""

    @abstractmethod
    async def load(self, path: Path, weight_version: int) -> None:
        """Read new weights.

        Raises:
            InvalidWeights: the server rejected them, and keeps the old ones.
            EngineFailed: it is unknown which weights the server has.
        """

    async def resume(self) -> None:  # noqa: B027
        """Undo `pause`."""

    @abstractmethod
    async def set_version(self, weight_version: int) -> None:
        """Have the server report this version for its weights, if it can."""

    async def _post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = CALL_S) -> Answer:
        data = None if body is None else msgspec.json.encode(body)
        return await self._connections.control("POST", path, data, timeout_s=timeout_s)

    def _check(self, answer: Answer, path: str, *allowed: int) -> None:
        if answer.status not in (200, *allowed):
            raise EngineFailed(f"{self._connections.url}{path} failed: {answer.excerpt()}")


class VllmUpdates(WeightUpdates):
    """Implements `WeightUpdates` for vLLM, which drops its prefix cache with each pause."""

    async def check(self) -> None:
        self._good(await self._connections.control("GET", "/is_paused", timeout_s=CALL_S), "/is_paused")

    async def abort_all(self) -> None:
        await self.pause("abort")
        await self.resume()

    async def pause(self, mode: UpdateMode) -> None:
        await self._call(f"/pause?mode={PAUSES[mode]}", timeout_s=DRAIN_S if mode == "drain" else CALL_S)

    async def name_loading(self) -> None:
        await self._call("/update_weight_version", {"new_version": LOADING_WORD})

    async def load(self, path: Path, weight_version: int) -> None:
        """Read new weights; see `WeightUpdates`. vLLM never rejects any: it fails."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._call("/collective_rpc", body, timeout_s=LOAD_S)
        await self.set_version(weight_version)

    async def resume(self) -> None:
        await self._call("/resume")

    async def set_version(self, weight_version: int) -> None:
        await self._call("/update_weight_version", {"new_version": str(weight_version)})

    async def _call(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = CALL_S) -> None:
        self._good(await self._post(path, body, timeout_s), path)

    def _good(self, answer: Answer, path: str) -> None:
        if answer.status in _ABSENT:
            raise EngineFailed(
                f"{self._connections.url} has no {path.partition('?')[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1, or "
                "let the trainer update the server by itself, between client.begin_weights and end_weights",
                missing=True,
            )
        self._check(answer, path)


class _Success(msgspec.Struct):
    success: bool
    message: str = ""


class SglangUpdates(WeightUpdates):
    """Implements `WeightUpdates` for SGLang, which needs no pause: its weights change when no generation of ours runs.

    Its `/pause_generation` does not help: an answer that was paused names only the weights that it ended with. Weights
    and their version come in one call, so there is nothing to name before it.
    """

    async def abort_all(self) -> None:
        answer = await self._post("/abort_request", {"rid": "", "abort_all": True})
        self._check(answer, "/abort_request")

    async def load(self, path: Path, weight_version: int) -> None:
        """Read new weights; see `WeightUpdates`. If they are unreadable, the server keeps the old ones."""
        body = {"model_path": str(path), "weight_version": str(weight_version)}
        answer = await self._post("/update_weights_from_disk", body, LOAD_S)
        self._check(answer, "/update_weights_from_disk", 400)
        done = decoded(answer.body, _Success)
        if not done.success:
            raise InvalidWeights(
                f"{self._connections.url} refused the weights at {path}: {done.message}", path=str(path)
            )

    async def set_version(self, weight_version: int) -> None:
        """Have answers report this version; servers that report only the version of loaded weights keep theirs."""
        body = {"new_version": str(weight_version), "abort_all_requests": False}
        answer = await self._post("/update_weight_version", body)
        self._check(answer, "/update_weight_version", *_ABSENT)
