"""The adapters of one vLLM server, loaded and removed over HTTP; requests name them as their model.

A server that was started again has none: it answers with 404, and `restore` loads an adapter again from its folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...errors import EngineFailed, InvalidWeights
from .weight_updates import CALL_S, LOAD_S

if TYPE_CHECKING:
    from pathlib import Path

    from .connections import Answer, Connections

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class ServerAdapters:
    """Knows which adapters the server was given, by model and version."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._paths: dict[tuple[str, int], Path] = {}

    async def load(self, adapter: tuple[str, int], path: Path) -> None:
        """Have the server load an adapter that was checked.

        Raises:
            InvalidWeights: the server cannot load it.
            EngineFailed: the server takes no adapters, or fails.
        """
        name, url = name_of(adapter), self._connections.url
        answer = await self._post(LOAD, {"lora_name": name, "lora_path": str(path)}, LOAD_S)
        if answer.status == 400 and b"already" in answer.body:  # by an earlier engine host, from another folder
            await self._post(UNLOAD, {"lora_name": name})
            answer = await self._post(LOAD, {"lora_name": name, "lora_path": str(path)}, LOAD_S)
        if answer.status in (404, 405) and name.encode() not in answer.body and str(path).encode() not in answer.body:
            raise EngineFailed(
                f"{url} has no {LOAD}: start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        if answer.status != 200:
            raise InvalidWeights(f"{url} cannot load the adapter in {path}: {answer.excerpt()}", path=str(path))
        self._paths[adapter] = path

    async def restore(self, adapter: tuple[str, int]) -> None:
        """Load an adapter again that the server has lost."""
        await self.load(adapter, self._paths[adapter])

    async def remove(self, adapter: tuple[str, int]) -> None:
        if self._paths.pop(adapter, None) is not None:
            answer = await self._post(UNLOAD, {"lora_name": name_of(adapter)})
            if answer.status not in (200, 404):
                raise EngineFailed(f"{self._connections.url}{UNLOAD} failed: {answer.excerpt()}")

    def check(self, adapter: tuple[str, int]) -> None:
        """Raise `EngineFailed` unless an adapter was loaded."""
        if adapter not in self._paths:
            model, version = adapter
            raise EngineFailed(f"version {version} of the adapter {model} is not loaded", unreachable=True)

    async def _post(self, path: str, body: dict[str, str], timeout_s: float = CALL_S) -> Answer:
        return await self._connections.control("POST", path, msgspec.json.encode(body), timeout_s=timeout_s)


def name_of(adapter: tuple[str, int]) -> str:
    """Return an adapter's name at the server."""
    model, version = adapter
    return f"{model}@{version}"
