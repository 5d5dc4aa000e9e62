"""How a server is told that new weights come, and to take them from a folder that it sees too.

Whoever updates asks `abort_all`, `pause` and `name_loading` before `load`, and `resume` after it, unless nobody knows
whether the load has ended; the order, and what a failure means, are the engine's. Where the trainer moves the weights
to the server by itself there is no `load`, but `set_version` before `resume`. vLLM has these calls only in its
development mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from ...errors import EngineFailed, InvalidWeights
from .dialect import LOADING_WORD, decoded

if TYPE_CHECKING:
    from pathlib import Path

    from ...wire.messages.engines import UpdateMode
    from .connections import Answer, Connections

CALL_S = 30.0
DRAIN_S = 1800.0
"""Longest wait for generations to end by themselves."""
LOAD_S = 1800.0
"""Longest reading of new weights: large models come from a network."""

PAUSES: Final[dict[UpdateMode, str]] = {"keep": "keep", "drain": "wait", "abort": "abort"}
"""vLLM's words."""


class WeightUpdates(Protocol):
    """One server's calls for new weights. All raise `EngineFailed` where the server has them not, or fails."""

    async def check(self) -> None:
        """Raise unless the server has these calls; with `missing=True`, it never will."""

    async def abort_all(self) -> None:
        """End the generations that are running; each is answered with what it has."""

    async def pause(self, mode: UpdateMode) -> None:
        """Stop between two tokens; what runs is treated as `mode` says."""

    async def name_loading(self) -> None:
        """Have the server say that it takes new weights, to whoever finds it if we die on the way."""

    async def load(self, path: Path, weight_version: int) -> None:
        """Read new weights.

        Raises:
            InvalidWeights: the server refused them, and has the old ones.
            EngineFailed: nobody knows which weights it has.
        """

    async def resume(self) -> None:
        """Undo `pause`."""

    async def set_version(self, weight_version: int) -> None:
        """Have the server call its weights this, where it can."""


class _Rpc(msgspec.Struct):
    method: str
    kwargs: dict[str, str]


class _NewVersion(msgspec.Struct):
    new_version: str


class VllmUpdates:
    """Implements `WeightUpdates` for vLLM."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def check(self) -> None:
        """Raise unless the server is in development mode."""
        self._good(await self._connections.control("GET", "/is_paused", timeout_s=CALL_S), "/is_paused")

    async def abort_all(self) -> None:
        """End the generations that are running."""
        await self.pause("abort")
        await self.resume()

    async def pause(self, mode: UpdateMode) -> None:
        """Stop between two tokens; vLLM forgets its prefix cache with it, which the old weights made."""
        await self._post(f"/pause?mode={PAUSES[mode]}", timeout_s=DRAIN_S if mode == "drain" else CALL_S)

    async def name_loading(self) -> None:
        """Have answers say `LOADING_WORD`."""
        await self._post("/update_weight_version", _NewVersion(LOADING_WORD))

    async def load(self, path: Path, weight_version: int) -> None:
        """Read new weights; see `WeightUpdates`. vLLM never refuses any: it fails."""
        await self._post("/collective_rpc", _Rpc("reload_weights", {"weights_path": str(path)}), timeout_s=LOAD_S)
        await self.set_version(weight_version)

    async def resume(self) -> None:
        """Go on."""
        await self._post("/resume")

    async def set_version(self, weight_version: int) -> None:
        """Have answers say this version."""
        await self._post("/update_weight_version", _NewVersion(str(weight_version)))

    async def _post(self, path: str, body: msgspec.Struct | None = None, timeout_s: float = CALL_S) -> None:
        data = None if body is None else msgspec.json.encode(body)
        self._good(await self._connections.control("POST", path, data, timeout_s=timeout_s), path)

    def _good(self, answer: Answer, path: str) -> None:
        if answer.status in (403, 404, 405):
            raise EngineFailed(
                f"{self._connections.url} has no {path.partition('?')[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1, or "
                "let the trainer update the server by itself, between client.begin_weights and end_weights",
                missing=True,
            )
        if answer.status != 200:
            raise EngineFailed(f"{self._connections.url}{path} failed: {answer.excerpt()}")


class _FromDisk(msgspec.Struct):
    model_path: str
    weight_version: str


class _Abort(msgspec.Struct):
    rid: str = ""
    abort_all: bool = True


class _SglangVersion(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = False


class _Success(msgspec.Struct):
    success: bool
    message: str = ""


class SglangUpdates:
    """Implements `WeightUpdates` for SGLang, which needs no pause: its weights change when nothing of ours runs.

    Its `/pause_generation` is of no use here: an answer that was paused names only the weights that it ended with.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def check(self) -> None:
        """Do nothing: every server has these calls."""

    async def abort_all(self) -> None:
        """End the generations that are running."""
        body = msgspec.json.encode(_Abort())
        answer = await self._connections.control("POST", "/abort_request", body, timeout_s=CALL_S)
        if answer.status != 200:
            raise EngineFailed(f"{self._connections.url}/abort_request failed: {answer.excerpt()}")

    async def pause(self, mode: UpdateMode) -> None:
        """Do nothing."""

    async def name_loading(self) -> None:
        """Do nothing: weights and their version come in one call."""

    async def load(self, path: Path, weight_version: int) -> None:
        """Read new weights; see `WeightUpdates`. Weights that cannot be read are given up for the old ones."""
        body = msgspec.json.encode(_FromDisk(str(path), str(weight_version)))
        answer = await self._connections.control("POST", "/update_weights_from_disk", body, timeout_s=LOAD_S)
        if answer.status not in (200, 400):
            raise EngineFailed(f"{self._connections.url}/update_weights_from_disk failed: {answer.excerpt()}")
        done = decoded(answer.body, _Success)
        if not done.success:
            raise InvalidWeights(
                f"{self._connections.url} refused the weights at {path}: {done.message}", path=str(path)
            )

    async def resume(self) -> None:
        """Do nothing."""

    async def set_version(self, weight_version: int) -> None:
        """Have answers say this version; servers that know it only of weights that they load go on saying theirs."""
        body = msgspec.json.encode(_SglangVersion(str(weight_version)))
        answer = await self._connections.control("POST", "/update_weight_version", body, timeout_s=CALL_S)
        if answer.status not in (200, 403, 404, 405):
            raise EngineFailed(f"{self._connections.url}/update_weight_version failed: {answer.excerpt()}")
