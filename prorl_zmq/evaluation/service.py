"""The service of an evaluation: its own, as a child process, or one that runs already.

An own service has one kind of backend and a temporary folder, and ends with the evaluation. If the evaluation is
killed, the kernel ends the service, and its folder is removed when the evaluation continues.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
import time
import tomllib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..config import BackendSettings, parse_topology
from ..errors import ConfigError, RequestTimeout
from ..inference.chat.loading import chat_format
from ..service.child import RUN_DIR_PREFIX, ChildService
from ..service.engine_starts import no_engine_left
from ..system.logs import one_line
from ..system.pauses import BLOCKED
from ..wire.messages.backends import ListBackends
from ..wire.messages.base import new_id
from .transcript import TextReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..wire.messages.backends import BackendList, BackendStatus
    from ..wire.messages.chat import ChatSettings

ROLES = ("init", "run", "eval")
ASK_S = 2.0
"""How long the service may take to answer one request while it starts."""
RUNNING_ASK_S = 4.0
"""How long a running service may take to answer the first request."""
PAUSE_S = 0.3
RUN_DIR = "run_dir"
"""The file in the service's folder that names its temporary folder."""
ENGINE_LOG = "engine-0.log"
LOG_TAIL_BYTES = 16_384
LOG_LOOK_S = 2.0
SHOWN_LINE = 160
"""Most characters of a log's line next to the progress: the end of the line has the reason."""
_BLAMED = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_-]*) cannot work with its settings")
"""The supervisor's message about a process with wrong settings."""
_BLOCKED = re.compile(re.escape(BLOCKED).replace("%s", "(.+?)"))


class OwnService(msgspec.Struct, frozen=True, kw_only=True):
    backend: BackendSettings
    slots: int
    sandbox: str
    image: str = ""
    image_folders: tuple[str, ...] = ()
    task_modules: tuple[str, ...] = ()

    def topology(self) -> str:
        """Return the topology file of the service.

        Raises:
            ConfigError: a setting is invalid.
        """
        defaults = msgspec.to_builtins(BackendSettings())
        given = msgspec.to_builtins(self.backend)
        tables = {
            "service": {"task_modules": list(self.task_modules)},
            "rollout_broker": {"ready_limit": self.slots, "max_session_share": 1.0},
            "sandbox": {"kind": self.sandbox, "image": self.image, "image_folders": list(self.image_folders)},
            "stage": [{"role": role, "slots": self.slots} for role in ROLES],
            "backends": [{name: each for name, each in given.items() if name == "kind" or each != defaults[name]}],
        }
        text = "".join(f"{name} = {_toml(table)}\n" for name, table in tables.items())
        try:
            parse_topology(tomllib.loads(text), "the service of this evaluation")
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"an option has characters that no topology file takes: {error}") from error
        return text


@contextmanager
def own_service(folder: Path, service: OwnService) -> Iterator[ChildService]:
    sweep(folder)
    child = ChildService(folder, service.topology())
    (folder / RUN_DIR).write_text(child.run_dir, encoding="utf-8")
    try:
        with child:
            yield child
    finally:
        (folder / RUN_DIR).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove the temporary folder of a service that was killed with its evaluation."""
    try:
        left = Path((folder / RUN_DIR).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return
    # What the file says is not trusted with more than a folder that such a service makes.
    if left.parent == Path(tempfile.gettempdir()) and left.name.startswith(RUN_DIR_PREFIX) and not left.is_symlink():
        shutil.rmtree(left, ignore_errors=True)
    (folder / RUN_DIR).unlink(missing_ok=True)


async def wait_ready(
    client: AsyncRolloutClient, child: ChildService | None, limit_s: float, on_wait: Callable[[str], None]
) -> tuple[BackendStatus, ...]:
    """Wait until the service has all three stages and an engine; return its backends."""
    if child is None:
        on_wait("the service to answer")
        await client.status(timeout_s=RUNNING_ASK_S)
    until = time.monotonic() + limit_s
    missing = "the service to answer"
    while time.monotonic() < until:
        if child is not None and not child.is_running:
            raise ConfigError(f"the service ended as it started: {_why(child.logs)}")
        on_wait(missing)
        with suppress(RequestTimeout):
            status = await client.status(timeout_s=ASK_S)
            listed: BackendList = await client.backends.ask(ListBackends(new_id()), ASK_S)
            backends = listed.backends
            if child is not None and (problem := no_engine_left(listed)):
                raise ConfigError(f"the engine cannot be started: {problem}")
            roles = {str(stage.role) for stage in status.stages}
            lacking = [f"a stage process for {role.upper()}" for role in ROLES if role not in roles]
            lacking += [] if backends else ["an engine"]
            if not lacking:
                return backends
            missing = " and ".join(lacking)
            if child is not None and not backends and (log := child.logs / ENGINE_LOG).exists():
                missing += f" ({_last_line(log)[-SHOWN_LINE:]})"
        await asyncio.sleep(PAUSE_S)
    where = f"; its logs are in {child.logs}" if child is not None else "; `prorl status` shows the service"
    raise RequestTimeout(f"waited {limit_s:g} s for {missing}{where}", timeout_s=limit_s)


class Readers:
    def __init__(self, backends: tuple[BackendStatus, ...], on_trouble: Callable[[str], None]) -> None:
        self._backends = {status.backend.backend_id: status.backend for status in backends}
        self._on_trouble = on_trouble
        self._readers: dict[tuple[ChatSettings, str], TextReader | None] = {}

    async def load(self) -> None:
        for backend in self._backends.values():
            key = backend.chat, backend.model
            if key in self._readers:
                continue
            try:
                self._readers[key] = TextReader(await chat_format(backend.chat), backend.chat, backend.model)
            except ConfigError as error:
                self._readers[key] = None
                self._on_trouble(f"trajectories are kept without texts, since {one_line(error.message)}")

    def model(self, backend_id: str) -> str:
        """Return the model that a backend reports; of one that came later, that of the others if they agree."""
        backend = self._backends.get(backend_id)
        if backend is not None:
            return backend.model or backend_id
        models = {one.model for one in self._backends.values()}
        return models.pop() if len(models) == 1 else ""

    def of(self, backend_id: str) -> TextReader | None:
        """Return the reader of a backend's tokens; of one that came later, the only reader if there is one."""
        backend = self._backends.get(backend_id)
        if backend is not None:
            return self._readers.get((backend.chat, backend.model))
        known = list(self._readers.values())
        return known[0] if len(known) == 1 else None


async def name_blocked(logs: Path, on_trouble: Callable[[str], None]) -> None:
    """Name each line of a task's code that blocks a stage process of the evaluation's own service; never returns."""
    known: set[str] = set()
    while True:
        for role in ROLES:
            for place in _BLOCKED.findall(_tail(logs / f"{role}-0.log")):
                if place not in known:
                    known.add(place)
                    on_trouble(f"{role} does nothing else until {one_line(place)} ends, which blocks its event loop")
        await asyncio.sleep(LOG_LOOK_S)


def _why(logs: Path) -> str:
    """Return the last line of the service's log, or of the log of the process that it blames for its end."""
    log = logs / "serve.log"
    if blamed := _BLAMED.search(_last_line(log)):
        log = logs / f"{blamed[1]}.log"
    return f"{_last_line(log)} ({log})"


def _last_line(log: Path) -> str:
    lines = reversed(_tail(log).split("\n"))
    return one_line(next((line.strip() for line in lines if line.strip()), "it said nothing"))


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _toml(value: object) -> str:
    """Return plain data as TOML: its texts and numbers are those of JSON, except DEL."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml(name)} = {_toml(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
