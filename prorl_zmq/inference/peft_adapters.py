"""Adapters on a transformers model: peft's LoRA layers, one adapter per row of a batch.

Layers are built from the checked description of an adapter and its tensors, never from its configuration, which may
have peft change the base's weights. Reading runs in any thread; everything else between two forward passes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer, LoraModel
from safetensors.torch import load_file

from ..errors import EngineFailed, InvalidWeights
from .adapters import PREFIX, WEIGHTS, check_adapter, not_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .adapters import Adapter

BASE = "__base__"
"""peft's name for rows without an adapter."""


class PeftAdapters:
    """The adapters of one model, by model and version.

    Args:
        model: the base, which gets LoRA layers while there is an adapter.
        folder: of its weights.
        rank: the largest rank of an adapter.
    """

    def __init__(self, model: Any, folder: Path, rank: int) -> None:
        self._base, self._folder, self._rank = model, folder, rank
        self._lora: LoraModel | None = None
        self._names: dict[tuple[str, int], str] = {}
        """peft's names, which must be those of attributes."""
        self._count = 0

    def read(self, path: Path) -> tuple[Adapter, dict[str, torch.Tensor]]:
        """Check and read an adapter.

        Raises:
            InvalidWeights: it cannot be used.
        """
        return check_adapter(path, self._folder, self._rank), load_file(path / WEIGHTS)

    @torch.no_grad()
    def attach(self, adapter: tuple[str, int], read: tuple[Adapter, dict[str, torch.Tensor]]) -> None:
        """Add what `read` returned to the model.

        Raises:
            InvalidWeights: the model's class has other layers in the place of those that the adapter is for.
        """
        described, tensors = read
        self._check_linear(described.modules)
        self.detach(adapter)
        name = f"adapter{self._count}"
        self._count += 1
        config = LoraConfig(
            r=described.rank,
            lora_alpha=cast("int", described.alpha),  # any number
            use_rslora=described.rank_stabilized,
            target_modules=list(described.modules),
            lora_dropout=0.0,
            init_lora_weights=False,
            inference_mode=True,
        )
        try:
            if self._lora is None:
                self._lora = LoraModel(self._base, {name: config}, name)
            else:
                self._lora.peft_config[name] = config
                self._lora.inject_adapter(self._base, name)
            for module in described.modules:
                layer: Any = self._base.get_submodule(module)
                layer.lora_A[name].weight.copy_(tensors[f"{PREFIX}{module}.lora_A.weight"])
                layer.lora_B[name].weight.copy_(tensors[f"{PREFIX}{module}.lora_B.weight"])
                layer.set_adapter([])  # each batch names its own
        except BaseException:  # such as memory; a partly attached adapter would change the base's answers
            self._remove(name)
            raise
        self._lora.eval().requires_grad_(requires_grad=False)
        self._names[adapter] = name

    def detach(self, adapter: tuple[str, int]) -> None:
        """Remove an adapter, if it is attached; without any, the model is the base alone."""
        name = self._names.pop(adapter, None)
        if name is not None:
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove an adapter's layers; with the last adapter, also peft's wrappers."""
        layers = {path: one for path, one in self._base.named_modules() if isinstance(one, LoraLayer)}
        if self._names and self._lora is not None:
            for layer in layers.values():
                layer.set_adapter([])
            self._lora.delete_adapter(name)
            return
        for path, layer in layers.items():
            parent, _, child = path.rpartition(".")
            setattr(self._base.get_submodule(parent), child, layer.get_base_layer())
        self._lora = None

    def move_to(self, model: Any) -> None:
        """Use another base model.

        Raises:
            EngineFailed: adapters of the former one are attached.
        """
        if self._names:
            raise EngineFailed("adapters are loaded, which are of the present weights: remove them first")
        self._base = model

    def check(self, adapter: tuple[str, int]) -> None:
        """Raise `EngineFailed` unless an adapter is attached."""
        if adapter not in self._names:
            raise not_loaded(adapter)

    def _check_linear(self, modules: Sequence[str]) -> None:
        for name in modules:
            try:
                module = self._base.get_submodule(name)
            except AttributeError:
                module = None
            if not isinstance(module, torch.nn.Linear | LoraLayer):
                raise InvalidWeights(f"the adapter is of {name}, which is no linear layer of the loaded model")

    def applied(self, adapters: Sequence[tuple[str, int] | None]) -> Callable[..., Any]:
        """Return the model for a batch whose rows have these adapters; None: the base alone."""
        if self._lora is None:
            forward: Callable[..., Any] = self._base
            return forward
        names = [BASE if adapter is None else self._names[adapter] for adapter in adapters]
        return partial(_forward, self._lora, names)


def _forward(lora: LoraModel, names: list[str], **inputs: Any) -> Any:
    with lora._enable_peft_forward_hooks(adapter_names=names):  # noqa: SLF001 - as `PeftModel.forward` does
        return lora(**inputs)
