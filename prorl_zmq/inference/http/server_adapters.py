"""The adapters of one vLLM server, loaded and removed over HTTP; requests name them as their model.

A server that was started again has none: it answers with 404, and `restore` loads an adapter again from its folder.
An adapter's name at the server is that of its folder, which no other adapter has: several engine hosts may share the
server, and one that is loaded already is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...errors import EngineFailed, InvalidWeights
from ..adapters import not_loaded
from .weight_updates import CALL_S, LOAD_S

if TYPE_CHECKING:
    from pathlib import Path

    from .connections import Answer, Connections

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NOT_NOW = frozenset({429, 502, 503, 504})
"""Statuses of a server that is busy or not there, which do not blame the adapter."""


class ServerAdapters:
    """Knows which adapters the server was given, by model and version."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._paths: dict[tuple[str, int], Path] = {}

    async def load(self, adapter: tuple[str, int], path: Path) -> None:
        """Have the server load an adapter that was checked.

        Raises:
            InvalidWeights: the server cannot load it.
            EngineFailed: the server takes no adapters, is busy, or fails.
        """
        name, url = path.name, self._connections.url
        answer = await self._post(LOAD, {"lora_name": name, "lora_path": str(path)}, LOAD_S)
        if answer.status in (404, 405) and name.encode() not in answer.body and str(path).encode() not in answer.body:
            raise EngineFailed(
                f"{url} has no {LOAD}: start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        if answer.status in NOT_NOW:
            raise EngineFailed(f"{url} does not load the adapter in {path} now: {answer.excerpt()}")
        if answer.status != 200 and not (answer.status == 400 and b"already been loaded" in answer.body):
            raise InvalidWeights(f"{url} cannot load the adapter in {path}: {answer.excerpt()}", path=str(path))
        earlier = self._paths.get(adapter, path)
        self._paths[adapter] = path
        if earlier != path:
            await self._post(UNLOAD, {"lora_name": earlier.name})

    async def restore(self, adapter: tuple[str, int]) -> None:
        """Load an adapter again that the server has lost."""
        path = self._paths.get(adapter)
        if path is not None:  # otherwise it was removed meanwhile
            await self.load(adapter, path)

    async def remove(self, adapter: tuple[str, int]) -> None:
        path = self._paths.pop(adapter, None)
        if path is not None:
            answer = await self._post(UNLOAD, {"lora_name": path.name})
            if answer.status not in (200, 404):
                raise EngineFailed(f"{self._connections.url}{UNLOAD} failed: {answer.excerpt()}")

    def name(self, adapter: tuple[str, int]) -> str:
        """Return an adapter's name at the server; raise `EngineFailed` unless it was loaded."""
        if adapter not in self._paths:
            raise not_loaded(adapter)
        return self._paths[adapter].name

    async def _post(self, path: str, body: dict[str, str], timeout_s: float = CALL_S) -> Answer:
        return await self._connections.control("POST", path, msgspec.json.encode(body), timeout_s=timeout_s)
