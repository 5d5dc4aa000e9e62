"""What a run leaves after each step, to be resumed from: one file, replaced as a whole."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import torch

from ...errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


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
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                torch.save({field.name: getattr(self, field.name) for field in fields(self)}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one; only tensors and plain data are taken from the file."""
        if not path.is_file():
            raise ConfigError(f"there is no checkpoint at {path}: leave out --resume to begin there", key="resume")
        try:
            return cls(**torch.load(path, weights_only=True))
        except Exception as error:  # of many kinds, since torch reads it
            raise ConfigError(f"{path} is not a checkpoint of this program: {error}", key="resume") from error
