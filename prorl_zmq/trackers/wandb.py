"""Weights & Biases, online or offline as its own settings and `WANDB_…` variables say.

The x axis is our own value `step`, since W&B's step can only grow and a trainer that resumes logs steps again. Texts
are cells of a `wandb.Table`, which its page shows as text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .adapter import TABLE, Adapter
from .conversation import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .adapter import RunSettings
    from .conversation import Conversation

STEP = "step"


class Wandb(Adapter):
    library = package = "wandb"

    def __init__(self, settings: RunSettings) -> None:
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=settings.project,
            id=settings.run,
            name=settings.run,
            resume="allow",
            dir=settings.folder,
            config=settings.config,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self.where = self._run.url or self._run.settings.sync_dir

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, STEP: step})

    def samples(self, rows: Sequence[Conversation], step: int) -> None:
        table = self._table(columns=list(COLUMNS), data=[msgspec.structs.astuple(row) for row in rows])
        self._run.log({TABLE: table, STEP: step})

    def close(self) -> None:
        self._run.finish()
