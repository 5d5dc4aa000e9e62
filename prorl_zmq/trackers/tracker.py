"""`Tracker`: a run in one tracker, several or none, that a trainer or an evaluation logs to.

Only rank 0 of a distributed trainer starts trackers' processes. Wrong names and settings are raised when the run is
opened. Later failures of a tracker never propagate, and only `close` blocks.
"""

from __future__ import annotations

import os
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ..errors import ConfigError
from ..system.plugins import load_plugin
from ..wire.messages.base import new_id
from .adapter import ADAPTER, GROUP, TRACKERS, RunSettings, Samples, Values
from .conversation import fitting
from .tracker_process import TrackerProcess
from .values import loggable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .adapter import Adapter, Entry
    from .conversation import Conversation

SAMPLES_BYTES = 64 * 2**20
"""Of all tables of one run."""
CLOSE_S = 30.0
CONFIG_BYTES = 100_000
CONFIG_CHARACTERS = 500
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class Tracker:
    """A run in one tracker, several or none. Tracker failures never propagate; only `close` blocks."""

    def __init__(self, trackers: Sequence[TrackerProcess], close_s: float = CLOSE_S) -> None:
        self._trackers = trackers
        self._close_s = close_s
        self._samples_left = SAMPLES_BYTES
        self._open = bool(trackers)

    @property
    def is_on(self) -> bool:
        """Whether anything is logged: a tracker was named, on this rank, and the run is not closed."""
        return self._open

    @property
    def where(self) -> dict[str, str]:
        """Where to find the run, by tracker; complete after `close`."""
        return {each.name: each.where for each in self._trackers if each.where}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step, such as `batch_values(…) | rollout_values(…)`. A resumed run may log a step again."""
        if self._open:
            self._put(Values(step, loggable(values)))

    def samples(self, rows: Sequence[Conversation], step: int) -> None:
        """Log a table of `sample_conversations`: at most 8 rows, 120 kB together, and 64 MiB in one run."""
        if self._open and self._samples_left > 0 and (table := fitting(rows)):
            self._samples_left -= self._put(Samples(step, tuple(table)))

    def close(self) -> None:
        """Wait until the trackers have stored what was logged, for at most `close_s` seconds, and end them."""
        if self._open:
            self._open = False
            until = time.monotonic() + self._close_s
            for tracker in self._trackers:
                tracker.hang_up(until)
            for tracker in self._trackers:
                tracker.close(until)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, entry: Entry) -> int:
        packet = msgspec.msgpack.encode(entry)
        for tracker in self._trackers:
            tracker.send(packet)
        return len(packet)


def open_tracker(
    *names: str,
    project: str = "prorl",
    run: str = "",
    folder: Path = Path(TRACKERS),
    config: Mapping[str, Any] | None = None,
    close_s: float = CLOSE_S,
) -> Tracker:
    """Start or continue a run. On ranks other than 0 of a distributed trainer, nothing is logged.

    Args:
        names: `wandb`, `tensorboard`, `trackio`, `mlflow`, or a tracker of another package; none: nothing is logged.
        project: What the run belongs to.
        run: The run's name: letters, digits and `._-`, at most 64. A run of this name in the project is continued.
            Empty: a new one.
        folder: For files of TensorBoard and Weights & Biases, and one log per tracker.
        config: The run's settings, as plain values. Everyone who can see the run can read them.
        close_s: How long `close` may wait for the trackers, in seconds.

    Raises:
        ConfigError: a name is unknown, its library is not installed, `project` or `run` has invalid characters, or the
            folder cannot be written. Later failures of a tracker are not raised.
    """
    for name in names:
        check_tracker(name)
    for key, value in (("project", project), ("run", run or "new")):
        if not _NAME.fullmatch(value):
            raise ConfigError(f"{key} {value!r}: letters, digits and ._- make its name, at most 64", key=key)
    if not names or not _is_first():
        return Tracker(())
    plain = {str(name): _plain(value) for name, value in (config or {}).items()}
    settings = RunSettings(project, run or f"run-{new_id()}", str(folder.absolute()), plain)
    if len(msgspec.msgpack.encode(settings)) > CONFIG_BYTES:
        raise ConfigError(f"the run's config is larger than {CONFIG_BYTES} bytes; log less of it", key="config")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Tracker([TrackerProcess(name, settings) for name in dict.fromkeys(names)], close_s)
    except OSError as error:
        raise ConfigError(f"trackers in {folder}: {error.strerror}", key="folder") from error


def check_tracker(name: str) -> None:
    """Check that a tracker is known and its library is installed.

    Raises:
        ConfigError: it is unknown, or its library is missing.
    """
    kind: type[Adapter] = load_plugin(GROUP, name, "tracker", key="log", base=ADAPTER)
    if find_spec(kind.library) is None:
        raise ConfigError(
            f"the tracker {name} needs {kind.library}, which is not installed: pip install {kind.package}", key="log"
        )


def _plain(value: object) -> str | int | float | bool | None:
    return value if value is None or isinstance(value, int | float) else str(value)[:CONFIG_CHARACTERS]


def _is_first() -> bool:
    """Return whether this is rank 0; before PyTorch knows, launchers say it in the environment."""
    if "torch.distributed" in sys.modules:
        from ..system.ranks import rank, ranks

        if ranks() > 1:
            return rank() == 0
    return os.environ.get("RANK", "0") == "0"
