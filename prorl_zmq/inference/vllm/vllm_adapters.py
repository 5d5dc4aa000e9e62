"""The adapters of a vLLM in this process.

vLLM caches results by an adapter's name and folder, and loads an adapter of a request that it does not have; it dies if
the folder is missing then. So each version gets a name and an id of its own, and is loaded before requests name it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError, EngineFailed, InvalidWeights
from ...system.threads import run_aside
from ..adapters import CONFIG, NOT_LINEAR, PREFIX, WEIGHTS, check_adapter, not_loaded, takes_none
from ..checkpoint import read_in_time, read_tensors
from .vllm_processes import is_cpu_build

if TYPE_CHECKING:
    from ...config import LoraSlots

LINEAR = tuple(f".{name}.weight" for name in ("q_proj", "qkv_proj", "o_proj", "down_proj", "c_attn", "query_key_value"))
"""Ends of names of linear layers that vLLM can adapt."""
CHECK_S = 60.0
"""Longest check of an adapter's folder, which may be on a network that hangs."""
LOAD_S = 300.0


class VllmAdapters:
    """Knows vLLM's `LoRARequest` of each loaded model and version.

    Args:
        llm: vLLM's `AsyncLLM`.
        model: the folder of its weights.
        lora: the adapters that it takes; None: none.
    """

    def __init__(self, llm: Any, model: Path, lora: LoraSlots | None) -> None:
        self._llm, self._model, self._lora = llm, model, lora
        self._requests: dict[tuple[str, int], Any] = {}
        self._ids = 0
        """Ids given so far: vLLM must never see one twice."""
        self._neutral: Any = None
        """Where requests without an adapter need one all the same: one that changes nothing."""
        self._folder: TemporaryDirectory[str] | None = None

    def request(self, adapter: tuple[str, int] | None) -> Any:
        """Return vLLM's name of an adapter; None: the engine's own weights.

        Raises:
            EngineFailed: it is not loaded.
        """
        if adapter is None:
            return self._neutral
        if adapter not in self._requests:
            raise not_loaded(adapter)
        return self._requests[adapter]

    async def load(self, adapter: tuple[str, int], path: Path) -> None:
        """Check and load an adapter; exceptions of a vLLM that has ended pass through.

        Raises:
            InvalidWeights: it cannot be used.
            EngineFailed: the engine takes no adapters.
        """
        if self._lora is None:
            raise takes_none()
        await read_in_time(CHECK_S, check_adapter, path, self._model, self._lora.rank)
        await self.remove(adapter)
        model, version = adapter
        request = self._new_request(f"{model}@{version}", path)
        try:
            async with asyncio.timeout(LOAD_S):
                await self._llm.add_lora(request)
        except TimeoutError:
            raise EngineFailed(f"vLLM did not load the adapter in {path} within {LOAD_S:g} s") from None
        except Exception as error:
            if self._llm is None or self._llm.errored:
                raise
            raise InvalidWeights(f"vLLM cannot load the adapter in {path}: {error}", path=str(path)) from error
        self._requests[adapter] = request

    async def remove(self, adapter: tuple[str, int]) -> None:
        request = self._requests.pop(adapter, None)
        if request is not None:
            await self._llm.remove_lora(request.lora_int_id)

    async def load_neutral(self) -> None:
        """On a CPU, load the adapter of requests that name none; see `_write_neutral`."""
        if self._lora is None or not is_cpu_build():
            return
        self._folder = TemporaryDirectory(prefix="prorl-neutral-")
        folder = Path(self._folder.name)
        await run_aside(_write_neutral, folder, self._model)
        self._neutral = self._new_request("neutral", folder)
        await self._llm.add_lora(self._neutral)

    def close(self) -> None:
        """Forget vLLM, which has ended."""
        self._llm = None
        if self._folder is not None:
            self._folder.cleanup()

    def _new_request(self, name: str, path: Path) -> Any:
        from vllm.lora.request import LoRARequest

        self._ids += 1
        return LoRARequest(name, self._ids, str(path))


def lora_flags(lora: LoraSlots | None, model: Path | None) -> list[str]:
    """Return vLLM's flags for these adapters; those that wait for a slot are kept in memory, too.

    Args:
        lora: the adapters; None: no flags.
        model: the folder of the weights; None: not known, so a CPU build cannot score texts.
    """
    if lora is None:
        return []
    rank = next(2**power for power in range(3, 10) if 2**power >= lora.rank)  # vLLM takes some ranks only
    return [
        "--enable-lora",
        f"--max-loras={lora.slots}",
        f"--max-lora-rank={rank}",
        f"--max-cpu-loras={2 * lora.slots}",
        *(_target_flags(model) if model is not None and is_cpu_build() else ()),
    ]


def _target_flags(model: Path) -> list[str]:
    """Return the flags that let adapters change linear layers only, not the output layer.

    With an adaptable output layer, a vLLM on a CPU ends when it scores a text together with other requests: it takes
    the text's positions for requests (vLLM 0.32, `PunicaWrapperCPU.add_lora_logits`).
    """
    modules = (
        name.removesuffix(".weight").split(".")
        for name, kind in read_tensors(model).items()
        if name.endswith(".weight") and len(kind.shape) == 2
    )
    names = {steps[-1] for steps in modules if "experts" not in steps} - NOT_LINEAR
    return ["--lora-target-modules", *sorted(names)]


def _write_neutral(folder: Path, model: Path) -> None:
    """Write an adapter that changes nothing, for requests of the base model.

    vLLM's CPU kernels take the index -1 of a request without an adapter as that of the last slot, so once all slots are
    filled such requests are answered with the weights of some adapter (vLLM 0.32, `lora/ops/torch_ops/lora_ops.py`).

    Raises:
        ConfigError: the model has no layer of a known name.
    """
    from safetensors.numpy import save_file

    linear = [(name, kind) for name, kind in sorted(read_tensors(model).items()) if name.endswith(LINEAR)]
    if not linear:
        raise ConfigError(f"{model} has no layer of a known name, so it cannot have adapters on a CPU", key="lora")
    name, kind = linear[0]
    module = name.removesuffix(".weight")
    outputs, inputs = kind.shape
    zeros = {"lora_A": (1, inputs), "lora_B": (outputs, 1)}
    config = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 1,
        "target_modules": [module.rpartition(".")[2]],
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(
        {f"{PREFIX}{module}.{part}.weight": np.zeros(shape, np.float32) for part, shape in zeros.items()},
        folder / WEIGHTS,
    )
