"""vLLM's own weight transfer, the receiving side: its processes join a trainer's group and take the tensors from there.

A group is made for each update, so that it has only engines that live. vLLM does not check that all tensors came, and
a transfer that breaks leaves layers of both versions. Only another whole transfer repairs that, which begins by ending
the broken one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...wire.messages.engines import TransferCall


def transfer_backend(config: Any) -> str:
    """Return the name of the backend that vLLM was started with (`--weight-transfer-config`); empty: none."""
    chosen = getattr(config, "weight_transfer_config", None)
    return "" if chosen is None else str(chosen.backend)


class VllmTransfer:
    """One engine's calls; they come one at a time, while it generates nothing. vLLM's exceptions pass through."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._joined = False
        self._active = False
        """Whether vLLM expects tensors."""
        self.half_loaded = False
        """Whether the weights may be of two versions."""
        self.changed = False
        """Whether tensors came since the engine's version was last set."""

    def fault(self, weight_version: int | None) -> str:
        """Return why the weights must not be served as this version, or, for None, the last one; empty: they may."""
        if self.half_loaded:
            return "the trainer's transfer ended before all weights had come"
        if self.changed and weight_version is None:
            return "the update did not end after the trainer's transfer, and the engine no longer has its old weights"
        return ""

    def close(self) -> None:
        """Drop the reference to vLLM, which has ended."""
        self._llm = None

    async def call(self, call: TransferCall, info: dict[str, Any]) -> None:
        """Do one call; see `WeightUpdate`."""
        match call:
            case "init":
                await self._init(info)
            case "update":
                await self._update(info)
            case "finish":
                await self._llm.finish_weight_update()
                self._active = self.half_loaded = False
            case "leave":
                await self._llm.shutdown_weight_transfer_engine()
                self._joined = False

    async def _init(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if self.half_loaded:
            if not self._active:
                await self._llm.start_weight_update()
            await self._llm.finish_weight_update()
            self._active = False
        if self._joined:  # vLLM forms no group while it has one
            await self._llm.shutdown_weight_transfer_engine()
        self._joined = True
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(info))

    async def _update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.half_loaded = self.changed = True
        if not self._active:
            await self._llm.start_weight_update()
            self._active = True
        try:
            await self._llm.update_weights(WeightTransferUpdateRequest(info))
        except BaseException:
            self._active = False  # as vLLM's processes do
            raise
