"""A folder of environments whose interpreter is this one, as if `prorl env install` had made it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import msgspec

from prorl_zmq.stages.package_store import RECORD, Installation

if TYPE_CHECKING:
    from pathlib import Path


def offer(root: Path, name: str, adapter: str) -> None:
    folder = root / name / "own"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    installation = Installation(name, "own", str(folder), "", "", time.time(), 1.0, 1000, adapter)
    (folder / RECORD).write_bytes(msgspec.json.encode(installation))
