"""TensorBoard, by tensorboardX, which needs neither TensorFlow nor PyTorch: `tensorboard --logdir FOLDER`.

A continued run adds a file to its folder. TensorBoard renders texts as Markdown, so a conversation is one block of
code, indented by four blanks: nothing in the text can end such a block.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapter import TABLE, Adapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .adapter import RunSettings
    from .conversation import Conversation

CODE = "    "


class TensorBoard(Adapter):
    library = package = "tensorboardX"

    def __init__(self, settings: RunSettings) -> None:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # which it imports for nothing: 450 MB
        from tensorboardX import SummaryWriter

        self.where = str(Path(settings.folder) / "tensorboard" / settings.run)
        # Its own name of a file has whole seconds: a run that is continued at once would write over the first one.
        self._writer: Any = SummaryWriter(self.where, filename_suffix=f".{time.time_ns()}")
        if settings.config:
            self._writer.add_text("config", _code(json.dumps(settings.config, indent=2)))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, rows: Sequence[Conversation], step: int) -> None:
        parts = [
            f"==== {row.job_id}: {row.task}, {row.outcome}, reward {row.reward}, {row.tokens} tokens\n{row.text}"
            for row in rows
        ]
        self._writer.add_text(TABLE, _code("\n\n".join(parts)), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _code(text: str) -> str:
    return textwrap.indent(text, CODE, lambda _: True)
