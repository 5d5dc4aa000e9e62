"""What a run has on disk: weights, as safetensors files that are checked before they are used, and its checkpoint."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...errors import ConfigError, InvalidWeights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from .model import Model


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield the name for a new file, which takes the old one's place as a whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    """Steps that were made."""
    session: str
    """The run's name at the service, which keeps under it what unfinished batches left."""
    seed: int
    position: int
    """The number of the next prompt: those before it were learned from, or are at the service."""
    learner: dict[str, Any]
    """`Learner.state`: weights, optimiser, random numbers."""

    def save(self, path: Path) -> None:
        """Write it; a reader, and a run that is killed, has the old file or the whole new one."""
        with _replacing(path) as temporary, temporary.open("wb") as file:
            torch.save({field.name: getattr(self, field.name) for field in fields(self)}, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one; only tensors and plain data are taken from the file."""
        if not path.is_file():
            raise ConfigError(f"there is no checkpoint at {path}: leave out --resume to begin there", key="resume")
        try:
            return cls(**torch.load(path, weights_only=True, map_location="cpu"))
        except Exception as error:  # of many kinds, since torch reads it
            raise ConfigError(f"{path} is not a checkpoint of this program: {error}", key="resume") from error


def save_weights(model: Model, path: Path) -> None:
    """Write a model's parameters; a reader sees no file, the old one, or the whole new one."""
    with _replacing(path) as temporary:
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, temporary)


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
