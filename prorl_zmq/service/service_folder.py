"""`ServiceFolder`: the folder of a service, on a file system that all nodes share.

    DIR/.prorl-service           marker: schema, the number of rollout brokers, who made it
    DIR/topology.toml            as for `prorl serve`; `[[stage]]`, `[[backends]]`, `[sandbox]` say what one node runs
    DIR/keys/service, node, client, operator     a key folder for each kind of process; `service` has the list of keys
    DIR/brokers/NAME.json        where a broker is bound, written by the broker
    DIR/journals/NAME.journal
    DIR/tasks/…                  task modules that the topology names by relative paths
    DIR/nodes/NAME.drain         asks a node to drain; the node removes it as it begins to
    DIR/lock                     held by `prorl serve` while it lives, with its host and process

All files are private to this user (0700). A broker that restarts announces its new address; clients without an answer
read its file again. The brokers' names are fixed when the folder is made, since sessions map to brokers by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import socket
import stat
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec

from ..config import SERVICE_VARIABLE, Topology, load_topology
from ..errors import ConfigError, EndpointInUse, RequestTimeout, VersionMismatch
from ..security.keys import PUBLIC, KeyFolder
from ..system.held_file import held
from ..system.python_files import copy_module
from ..wire.messages.base import PROTOCOL_VERSION, Identifier, KeyRole, new_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..system.held_file import HeldFile

MARKER, TOPOLOGY, LOCK = ".prorl-service", "topology.toml", "lock"
SCHEMA = 1
BACKENDS, NODES = "backends", "nodes"
"""The name of the backend broker, and the folder of drain requests."""
KEYS = {"node": KeyRole.STAGE, "client": KeyRole.TRAINER, "operator": KeyRole.OPERATOR}
"""The keys that the service accepts, each in a folder of this name."""
FOLDERS, TASKS = ("brokers", "journals"), "tasks"
BEFORE = {TOPOLOGY, "slurm", LOCK, MARKER, "keys", TASKS, *FOLDERS}
"""Names that a folder may contain before it becomes a service's."""
LOOK_S = 0.1
WAIT_S = 60.0
"""How long a starting process waits for the brokers that it needs."""


class Announcement(msgspec.Struct, frozen=True):
    """Where a broker is bound."""

    kind: Literal["rollout", "backend"]
    name: Identifier
    endpoints: dict[str, str]
    """`front_door` and `stage_events`, or `endpoint`."""
    host: str
    pid: int
    started_at: float
    service_id: str
    """Identifies the life of `prorl serve` that it belongs to."""
    version: str
    protocol: int


class _Marker(msgspec.Struct, frozen=True):
    schema: int
    rollout_brokers: Annotated[int, msgspec.Meta(ge=1, le=64)]
    made_by: str
    version: str


class ServiceFolder:
    """A service's folder; `create` or `open` it."""

    def __init__(self, path: Path, rollout_brokers: int) -> None:
        self.path = path
        self.rollout_brokers = tuple(f"rollout-{number}" for number in range(rollout_brokers))
        """Their names."""

    @classmethod
    def create(cls, path: Path, topology: Path | None = None) -> Self:
        """Make the folder, its keys, and its topology file: a copy of `topology`, or the existing one.

        Raises:
            ConfigError: the folder cannot be made, is another user's, or has other files; or the topology is invalid.
            EndpointInUse: another process is making it.
        """
        path = _absolute(path)
        try:
            path.mkdir(parents=True, mode=0o700, exist_ok=True)
            _check_private(path)
            if others := sorted(each.name for each in path.iterdir() if not _is_ours(each.name)):
                raise _wrong(f"{path} has other things in it ({', '.join(others[:3])}); name an empty or new folder")
            with cls(path, 0).held():
                if not cls.is_made(path):  # another process may have made it
                    _make(path, topology)
        except OSError as error:
            raise _wrong(f"{path} cannot be made a service's folder: {error.strerror}") from error
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing folder.

        Raises:
            ConfigError: it is not a service's folder, is another user's, or others can read it.
        """
        path = _absolute(path)
        try:
            _check_private(path)
            marker = msgspec.convert(tomllib.loads((path / MARKER).read_text("utf-8")), _Marker)
        except FileNotFoundError:
            raise _wrong(f"{path} is not a service's folder: `prorl serve --service {path}` makes one") from None
        except OSError as error:
            raise _wrong(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, msgspec.ValidationError) as error:
            raise _wrong(f"{path / MARKER} is not what prorl-zmq wrote: {error}") from None
        if marker.schema != SCHEMA:
            raise _wrong(
                f"{path} was made by prorl-zmq {marker.version} in another form ({marker.schema}, ours is {SCHEMA}): "
                "use that version, or another folder"
            )
        return cls(path, marker.rollout_brokers)

    @staticmethod
    def is_made(path: Path) -> bool:
        return (path / MARKER).exists()

    def topology(self) -> Topology:
        """Read the topology file.

        Raises:
            ConfigError: it is invalid, or has another number of rollout brokers than the folder was made for.
        """
        topology = load_topology(self.path / TOPOLOGY, self.path / TASKS)
        if topology.service.rollout_brokers != len(self.rollout_brokers):
            raise ConfigError(
                f"{self.path / TOPOLOGY}: service.rollout_brokers is {topology.service.rollout_brokers}, and the "
                f"folder was made for {len(self.rollout_brokers)}: sessions belong to them by name; make another one",
                key="service.rollout_brokers",
            )
        return topology

    def keys(self, name: Literal["service", "node", "client", "operator"]) -> Path:
        """Return a key folder."""
        return self.path / "keys" / name

    def journal(self, broker: str) -> Path:
        return self.path / "journals" / f"{broker}.journal"

    # Where brokers are ------------------------------------------------------------------------------------------------

    def announce(self, kind: Literal["rollout", "backend"], name: str, endpoints: dict[str, str]) -> None:
        """Write where a broker of this process is bound."""
        from importlib.metadata import version

        life, ours = os.environ.get(SERVICE_VARIABLE, ""), version("prorl-zmq")
        where = (kind, name, endpoints, socket.gethostname(), os.getpid(), time.time(), life, ours, PROTOCOL_VERSION)
        write_whole(self.path / "brokers" / f"{name}.json", msgspec.json.encode(Announcement(*where)).decode())

    def announcement(self, name: str) -> Announcement | None:
        """Return a broker's last announcement; None: there is none, or its file cannot be read now."""
        try:
            return msgspec.json.decode((self.path / "brokers" / f"{name}.json").read_bytes(), type=Announcement)
        except (OSError, msgspec.MsgspecError):
            return None

    def broker_endpoints(self) -> dict[str, dict[str, str]]:
        """Return the endpoints of all announced brokers, by name."""
        found = {name: self.announcement(name) for name in (*self.rollout_brokers, BACKENDS)}
        return {name: one.endpoints for name, one in found.items() if one is not None}

    def check_version(self) -> str:
        """Return the announced brokers' package version if it differs from this process's, else an empty string.

        Raises:
            VersionMismatch: they use another protocol version.
        """
        from importlib.metadata import version

        ours, other = version("prorl-zmq"), ""
        for name in (*self.rollout_brokers, BACKENDS):
            one = self.announcement(name)
            if one is not None and one.protocol != PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"the brokers of {self.path} are of prorl-zmq {one.version} (protocol {one.protocol}), this is "
                    f"{ours} ({PROTOCOL_VERSION}); install the same version on all machines",
                    ours=PROTOCOL_VERSION,
                    theirs=one.protocol,
                )
            if one is not None and one.version != ours:
                other = one.version
        return other

    def stage_events(self) -> dict[str, str]:
        """Return each announced rollout broker's endpoint for stage processes."""
        found = self.broker_endpoints()
        return {name: found[name]["stage_events"] for name in self.rollout_brokers if name in found}

    def backend_broker(self, service_id: str = "") -> str:
        """Return the backend broker's endpoint; empty: not announced, or in another life than `service_id`."""
        one = self.announcement(BACKENDS)
        return one.endpoints["endpoint"] if one is not None and service_id in ("", one.service_id) else ""

    def front_door(self, session: str) -> str:
        """Return the endpoint of a session's rollout broker; empty: not announced."""
        one = self.announcement(self.broker_of(session))
        return one.endpoints["front_door"] if one is not None else ""

    def broker_of(self, session: str) -> str:
        """Return the name of a session's rollout broker, by rendezvous hashing."""
        return max(self.rollout_brokers, key=lambda name: hashlib.blake2b(f"{name} {session}".encode()).digest())

    def session_of(self, broker: str) -> str:
        """Return a session that belongs to a rollout broker, for a client that only reads."""
        names = (f"look-{number}" for number in itertools.count())
        return next(name for name in names if self.broker_of(name) == broker)

    def wait_for_brokers(self, timeout_s: float, service_id: str = "") -> dict[str, dict[str, str]]:
        """Wait until all brokers are announced (in the life `service_id`, if given), and return their endpoints.

        Raises:
            RequestTimeout: some are not.
        """
        names = (*self.rollout_brokers, BACKENDS)
        self.wait_for(names, timeout_s, service_id)
        return self.broker_endpoints()

    def wait_for(self, names: Sequence[str], timeout_s: float, service_id: str = "") -> None:
        """Wait until these brokers are announced, as `wait_for_brokers` does."""
        until = time.monotonic() + timeout_s
        while missing := [name for name in names if not self._is_there(name, service_id)]:
            if time.monotonic() >= until:
                raise RequestTimeout(self.not_announced(", ".join(missing), timeout_s), timeout_s=timeout_s)
            time.sleep(LOOK_S)

    def not_announced(self, names: str, waited_s: float) -> str:
        """Return the error text for missing brokers."""
        return (
            f"no broker called {names} was announced in {self.path} within {waited_s:.1f} s; is the service running? "
            f"(`prorl serve --service {self.path}`)"
        )

    def _is_there(self, name: str, service_id: str) -> bool:
        one = self.announcement(name)
        return one is not None and service_id in ("", one.service_id)

    # One service at a time --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self, *, take_over: bool = False) -> Iterator[HeldFile]:
        """Lock the folder for a service.

        Args:
            take_over: do so although another service has the lock, which ends when it notices.

        Raises:
            EndpointInUse: another service has it.
            ConfigError: the file system has no locks.
        """
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(held(self.path / LOCK, take_over=take_over))
            except EndpointInUse as error:
                raise EndpointInUse(
                    f"another service runs in {self.path}: {error.message}; stop it there, or, if that machine is "
                    f"dead, `prorl serve --service {self.path} --take-over`",
                    endpoint=str(self.path),
                ) from None
            yield lock


def _is_ours(name: str) -> bool:
    return name in BEFORE or name.startswith((f".{TOPOLOGY}.", f".{MARKER}."))  # of `write_whole`


def _make(path: Path, topology: Path | None) -> None:
    if topology is not None:
        _copy_topology(topology, path / TOPOLOGY)
    (path / TOPOLOGY).touch(0o600)
    settings = load_topology(path / TOPOLOGY).service
    for name in FOLDERS:
        (path / name).mkdir(mode=0o700, exist_ok=True)
    shutil.rmtree(path / "keys", ignore_errors=True)  # left by an interrupted `create`
    (path / "keys").mkdir(mode=0o700)
    _make_keys(path / "keys")
    marker = {"schema": SCHEMA, "rollout_brokers": settings.rollout_brokers}
    from importlib.metadata import version

    made = {**marker, "made_by": f"{os.getuid()}@{socket.gethostname()}", "version": version("prorl-zmq")}
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in made.items()]
    write_whole(path / MARKER, "# The folder of one prorl_zmq service.\n" + "\n".join(lines) + "\n")


def _make_keys(keys: Path) -> None:
    service = KeyFolder(keys / "service")
    service.new("service", KeyRole.SERVICE)
    for name, role in KEYS.items():
        KeyFolder(keys / name).new(name, role)
        service.allow(keys / name / f"{name}{PUBLIC}", role)
        shutil.copyfile(keys / "service" / f"service{PUBLIC}", keys / name / f"service{PUBLIC}")


def _copy_topology(source: Path, target: Path) -> None:
    """Copy a topology file, with the task modules that it names by relative paths."""
    for name in load_topology(source, Path()).service.task_modules:
        if not Path(name).is_absolute():
            copy_module(source.absolute().parent, name, target.parent / TASKS)
    if not (target.exists() and source.samefile(target)):
        write_whole(target, source.read_text("utf-8"))


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        ConfigError: it cannot be written, for example on a full disk.
    """
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{new_id()[:8]}")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise _wrong(f"{path} cannot be written: {error.strerror}") from error


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # `~` of a user without a home directory
        raise _wrong(f"{path}: {error}") from error


def _check_private(path: Path) -> None:
    state = path.stat()
    if not stat.S_ISDIR(state.st_mode):
        raise _wrong(f"{path} is not a folder")
    if state.st_uid != os.getuid():
        raise _wrong(f"{path} belongs to another user (uid {state.st_uid}): a service's folder is its user's alone")
    if state.st_mode & 0o077:
        mode = stat.S_IMODE(state.st_mode)
        raise _wrong(f"others can read or change {path} (mode {mode:04o}), which holds keys: chmod 700 {path}")


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, key="service")
