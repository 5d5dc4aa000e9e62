"""Trackio, in the folder, Space or server that its `TRACKIO_…` variables name: `trackio show --project PROJECT`.

Texts are cells of a `trackio.Table`, which its page shows as text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .adapter import TABLE, Adapter
from .conversation import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .adapter import RunSettings
    from .conversation import Conversation


class Trackio(Adapter):
    library = package = "trackio"

    def __init__(self, settings: RunSettings) -> None:
        import trackio

        self._table = trackio.Table
        project, run = settings.project, settings.run
        self._run: Any = trackio.init(project, run, config=settings.config, resume="allow", embed=False)
        self.where = f"trackio show --project {settings.project}"

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, rows: Sequence[Conversation], step: int) -> None:
        table = self._table(columns=list(COLUMNS), data=[list(msgspec.structs.astuple(row)) for row in rows])
        self._run.log({TABLE: table}, step=step)

    def close(self) -> None:
        self._run.finish()
