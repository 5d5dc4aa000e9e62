"""The experts that the routers of a Hugging Face mixture choose, by forward hooks."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .records import narrow_experts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_ROUTER = re.compile(r"top_?krouter$", re.IGNORECASE)
"""The end of a router's class name; its output is the logits of all experts, and the weights and ids of the chosen."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RouterTap:
    """Notes the choices of a model's routers while it is open."""

    def __init__(self, model: Any) -> None:
        self.layers: int = model.config.get_text_config().num_hidden_layers
        self._model = model
        self._chosen: dict[int, torch.Tensor] = {}
        """By layer, int64 [tokens, k]."""
        self._open = False
        self._experts = 0
        self._numbers: list[int] = []
        """The layers that have a router; -1 for one whose layer is unknown."""
        for name, module in model.named_modules():
            if _ROUTER.search(type(module).__name__):
                found = _LAYER.search(name)
                number = int(found[1]) if found else -1
                self._numbers.append(number)
                module.register_forward_hook(self._hook(number))

    def complete(self) -> bool:
        """Return whether the choices of all routers can be read: run the model on one token, if it has routers."""
        numbers = self._numbers
        if not numbers or len({*numbers}) != len(numbers) or not all(0 <= one < self.layers for one in numbers):
            return False
        with self.open(), torch.inference_mode():
            self._model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=self._model.device))
        shapes = {tuple(chosen.shape) for chosen in self._chosen.values()}
        return {*self._chosen} == {*numbers} and len(shapes) == 1

    @contextmanager
    def open(self) -> Iterator[None]:
        """Note the choices of one forward pass."""
        self._chosen, self._open = {}, True
        try:
            yield
        finally:
            self._open = False

    def routes(self) -> NDArray[Any]:
        """Return the noted choices, uint8 or uint16 [tokens, layers, k], with zeros in layers that have no router."""
        some = next(iter(self._chosen.values()))
        empty = torch.zeros_like(some)
        stacked = torch.stack([self._chosen.get(layer, empty) for layer in range(self.layers)], dim=1)
        return narrow_experts(np.ascontiguousarray(stacked.cpu().numpy()), self._experts)

    def _hook(self, layer: int) -> Any:
        def note(_: Any, __: Any, output: Any) -> None:
            if self._open and isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point():
                self._experts = output[0].shape[-1]
                self._chosen[layer] = output[2].reshape(-1, output[2].shape[-1])

        return note
