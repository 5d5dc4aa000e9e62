"""Weights on disk: safetensors files, which the trainer writes and the engine reads, checked before they are used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...errors import InvalidWeights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from .model import Model


def save_weights(model: Model, path: Path) -> None:
    """Write a model's parameters; a reader sees no file, the old one, or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_weights(path: Path, model: Model) -> dict[str, Tensor]:
    """Read parameters that `model` can take; it is not changed."""
    try:
        if not path.is_file():
            raise OSError("there is no such file")
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidWeights(f"{path} cannot be read as safetensors: {error}", path=str(path)) from error
    wanted = model.state_dict()
    if found.keys() != wanted.keys():
        raise InvalidWeights(f"{path} is of another model: its tensors have other names", path=str(path))
    for name, value in found.items():
        if value.shape != wanted[name].shape or value.dtype != wanted[name].dtype:
            raise InvalidWeights(
                f"{path}: {name} is {value.dtype} {list(value.shape)}, in the model {wanted[name].dtype} "
                f"{list(wanted[name].shape)}",
                path=str(path),
            )
        if not bool(torch.isfinite(value).all()):
            raise InvalidWeights(f"{path}: {name} holds numbers that are not finite", path=str(path))
    return found
