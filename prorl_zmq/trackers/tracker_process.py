"""A run's trackers, each in a process of its own, so that none can end, slow or litter the run that it watches.

Frames: one packet per entry on a socket pair (see `entries`), never waited for. What the socket does not take is kept
here up to `PENDING_BYTES` and sent with later entries; what is beyond is lost. So a tracker that hangs, in its library,
its network or its disk, costs a run the packing of entries, and one warning. Closing waits for a time, then ends the
process. If the trainer dies, the kernel closes the socket, and the tracker ends its run in good order.
Left out on purpose: reading back what was logged, and the libraries' own calls; who wants these uses the library.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ..errors import ConfigError
from ..system.logs import one_line
from ..system.plugins import load_plugin
from ..system.processes import ISOLATED
from ..wire.messages.base import new_id
from .conversation import fitting
from .entries import PACKET_BYTES, Answer, Opened, Samples, Values
from .tracker import ADAPTER, GROUP, TRACKERS, RunSettings
from .values import loggable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .conversation import Conversation
    from .entries import Entry
    from .tracker import Adapter

PENDING_BYTES = 8 * 2**20
SAMPLES_BYTES = 64 * 2**20
"""Of all tables of one run."""
CLOSE_S = 30.0
KILL_S = 5.0
"""How long the kernel may take to end a process."""

CONFIG_BYTES = 100_000
CONFIG_CHARACTERS = 500

log = logging.getLogger("prorl.trackers")
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class TrackerProcess:
    """One tracker: its process, the socket to it, and what waits to be sent."""

    def __init__(self, name: str, settings: RunSettings) -> None:
        self.name = name
        self.where = ""
        """Where a person finds the run; empty before it is open."""
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._lost = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        with theirs, (Path(settings.folder) / f"{name}.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *ISOLATED, "-m", "prorl_zmq.trackers.tracker_child", name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.send(msgspec.msgpack.encode(settings))

    @property
    def pid(self) -> int:
        return self._process.pid

    def hang_up(self, until: float) -> None:
        """Send what waits, and then the end."""
        while self._pending and (left_s := until - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            poller.poll(1000 * left_s)
            self._flush()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, until: float) -> None:
        """Wait for the process to end its run."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # a library may have processes of its own
            self._process.wait(KILL_S)
            log.warning("%s did not end its run in time, and was killed: the last values may be lost", self)
        self._hear()
        self._socket.close()

    def __str__(self) -> str:
        return f"tracker {self.name}"

    def send(self, packet: bytes) -> None:
        self._hear()
        if self._pending_bytes + len(packet) > PENDING_BYTES:
            self._lost += 1
            if self._lost == 1:
                log.warning("%s takes nothing at the moment: what is logged until it does is lost", self)
            return
        self._pending.append(packet)
        self._pending_bytes += len(packet)
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; to a process that has ended, nothing is kept."""
        while self._pending:
            try:
                self._socket.send(self._pending[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._ended()
                return
            self._pending_bytes -= len(self._pending.popleft())

    def _ended(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0
        self._lost += 1
        if self._lost == 1:
            log.warning("%s has ended (exit code %s), and is off", self, self._process.poll())

    def _hear(self) -> None:
        while packet := self._next_answer():
            answer = _decoder.decode(packet)
            if isinstance(answer, Opened):
                self.where = one_line(answer.where)
            else:
                log.warning("%s: %s", self, one_line(answer.message))

    def _next_answer(self) -> bytes:
        try:
            return self._socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return b""
        except ConnectionResetError:  # said once, where the process has ended without having read all; answers follow
            return self._next_answer()


class Tracker:
    """A run in one tracker, several or none. No call raises for a tracker's sake, and none but `close` waits."""

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
        """Where a person finds the run, by tracker; complete after `close`."""
        return {each.name: each.where for each in self._trackers if each.where}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Note values of a step, such as `batch_values(…) | rollout_values(…)`. A resumed run may log a step again."""
        if self._open:
            self._put(Values(step, loggable(values)))

    def samples(self, rows: Sequence[Conversation], step: int) -> None:
        """Note a table of `sample_conversations`: at most 8 rows, 120 kB together, and 64 MiB in one run."""
        if self._open and self._samples_left > 0 and (table := fitting(rows)):
            self._samples_left -= self._put(Samples(step, tuple(table)))

    def close(self) -> None:
        """Wait until the trackers have what was logged, for at most `close_s` seconds, and end them."""
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
    """Begin to log a run, or to log on. On another rank than 0 of a distributed trainer, nothing is logged.

    Args:
        names: `wandb`, `tensorboard`, `trackio`, `mlflow`, or a tracker of another package; none: nothing is logged.
        project: What the run belongs to.
        run: The run's name: letters, digits and `._-`, at most 64. A run of this name in the project is continued.
            Empty: a new one.
        folder: For files of TensorBoard and Weights & Biases, and one log per tracker.
        config: What the run is about: plain values, which all who may see the run can read.
        close_s: How long `close` may wait for the trackers.

    Raises:
        ConfigError: a name is unknown, its library is not installed, `project` or `run` is no such name, or the folder
            cannot be written. Nothing that happens in a tracker later is raised.
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
    """Check that there is such a tracker, with its library.

    Raises:
        ConfigError: there is not.
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
