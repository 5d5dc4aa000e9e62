"""`ProcessPlan`: everything that a process of a service starts with, filled from a topology or a command's flags.

The supervisor passes it as a JSON file in the run folder, which only its user can read.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from ..config import BackendSettings, GatewaySettings, Topology  # noqa: TC001 - msgspec reads the annotations at run time
from ..errors import ConfigError
from ..system.files import open_regular
from ..system.unix_peers import way_problem
from ..wire.messages.base import PROTOCOL_VERSION
from ..wire.messages.jobs import Phase  # noqa: TC001 - msgspec reads the annotations at run time

if TYPE_CHECKING:
    from pathlib import Path

PLANS = "plans"
"""The folder of the plans, in the run folder."""
PLAN_LIMIT_BYTES = 4 * 2**20
"""Largest plan that is read."""
BROKER_RANK, ENGINE_RANK, STAGE_RANK = 0, 1, 2
FORKED_KINDS = ("embedded", "http")
"""Engine kinds whose hosts import nothing that breaks in a fork."""


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="process"):
    """The fields that all processes have."""

    name: str
    """Of the process: of its log, of a rollout broker in its service, and of an engine in the brokers' lists."""
    topology: Topology
    service: str = ""
    """The folder of a service, which says where the brokers are; empty: none."""
    protocol: int = PROTOCOL_VERSION
    """The writer's; a reader of another version refuses the plan."""

    rank: ClassVar[int] = STAGE_RANK
    """Processes are ended in descending order of rank: stages first, brokers last."""
    program: ClassVar[str] = "prorl"
    """The program name in its error reports."""
    serves_http: ClassVar[bool] = False

    @property
    def of_node(self) -> bool:
        """Whether it belongs to the node, and ends with it."""
        return isinstance(self, EnginePlan | StagePlan)

    @property
    def stage_role(self) -> str:
        """The role of a stage process; empty: not a stage process."""
        return ""

    @property
    def process(self) -> str:
        """The kind of process, as in metrics."""
        return str(self.__struct_config__.tag)

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        return sys.executable

    @property
    def forked(self) -> bool:
        """Whether it may be a fork of a process that has imported this package, and not only a fresh interpreter."""
        return True

    @property
    def file(self) -> Path:
        return self.topology.run_dir / PLANS / f"{self.name}.{self.process}.json"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the interpreter."""
        return ("-m", "prorl_zmq.cli", "prorl-child", str(self.file))

    def write(self) -> None:
        """Write the file, which only this user can read: an engine's options may hold secrets.

        Raises:
            OSError: it cannot be written.
        """
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        part = self.file.with_suffix(".part")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))
        part.replace(self.file)


class BrokerPlan(ProcessPlan, frozen=True, kw_only=True, tag="broker"):
    kind: Literal["rollout", "backend", "node"]
    """A node's broker is for the topology's node."""
    address: str = ""
    """In a service with a folder: this machine's address for other nodes."""

    rank: ClassVar[int] = BROKER_RANK

    @property
    def process(self) -> str:
        return f"{self.kind}_broker"

    @property
    def of_node(self) -> bool:
        return self.kind == "node"


class EnginePlan(ProcessPlan, frozen=True, kw_only=True, tag="engine"):
    backend: BackendSettings
    """One engine, with its own `gpus`, `cores` and `urls`."""
    connect: str = ""
    """The backend broker's endpoint; empty: from the service's folder."""
    bind: str = ""
    """Where stage processes reach it; empty: ipc, or loopback TCP."""
    weight_version: int = 0

    rank: ClassVar[int] = ENGINE_RANK
    program: ClassVar[str] = "prorl-engine"

    @property
    def python(self) -> str:
        return self.backend.python or sys.executable

    @property
    def forked(self) -> bool:
        return self.python == sys.executable and self.backend.kind in FORKED_KINDS


class StagePlan(ProcessPlan, frozen=True, kw_only=True, tag="stage"):
    role: Phase
    slots: int = 8
    connect: str
    """The rollout broker's endpoint for stage events, or the node broker's."""
    bind: str = ""
    """Where the broker reaches it; empty: ipc, or loopback TCP."""
    tasks: tuple[str, ...] = ()
    """Serve only these; empty: all installed ones."""

    program: ClassVar[str] = "prorl-stage"

    @property
    def stage_role(self) -> str:
        return self.role

    @property
    def process(self) -> str:
        return f"stage_{self.role}"


class HttpPlan(ProcessPlan, frozen=True, kw_only=True, tag="http"):
    """The gateway, the dashboard, or the server of this run folder's metrics."""

    serves: Literal["gateway", "dashboard", "metrics"]
    settings: GatewaySettings
    front_door: str = ""
    """Empty: from the service's folder."""
    gateway: str = ""
    """Name of this gateway; empty: made of host and port."""
    timeout_s: float = 10.0
    """How long the service may take to answer."""

    serves_http: ClassVar[bool] = True

    @property
    def process(self) -> str:
        return self.serves


AnyPlan = BrokerPlan | EnginePlan | StagePlan | HttpPlan


class _Version(msgspec.Struct):
    protocol: int = PROTOCOL_VERSION


def read_plan(path: Path) -> AnyPlan:
    """Read a process's plan.

    Raises:
        ConfigError: the file cannot be read, another account could have written it, or it is not a plan of this version
            of the package.
    """
    try:
        content = _own_content(path)
        version = msgspec.json.decode(content, type=_Version).protocol
        if version != PROTOCOL_VERSION:
            words = f"{path} is a plan of protocol version {version}, and this interpreter has {PROTOCOL_VERSION}"
            raise ConfigError(f"{words}; install the same version of prorl-zmq in both environments", key="plan")
        plan: AnyPlan = msgspec.json.decode(content, type=AnyPlan)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", key="plan") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        words = "`prorl serve` and `prorl node` write plans, for an interpreter with the same version of prorl-zmq"
        raise ConfigError(f"{path} is not a process's plan: {error}; {words}", key="plan") from error
    return plan


def _own_content(path: Path) -> bytes:
    """Return the content of a file that only this user, or root, can have written: it names what to run."""
    problem = way_problem(path)
    with os.fdopen(open_regular(str(path), os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
        if not problem and os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            problem = f"others may write to {path} (chmod go-w makes it yours)"
        if problem:
            raise ConfigError(f"a process's plan must be this user's alone: {problem}", key="plan")
        content = file.read(PLAN_LIMIT_BYTES + 1)
    if len(content) > PLAN_LIMIT_BYTES:
        words = f"{path} is larger than the {PLAN_LIMIT_BYTES} bytes that a process's plan may have"
        raise ConfigError(words, key="plan")
    return content


def pinned(topology: Topology) -> Topology:
    """Return a topology with absolute run folder and explicit node name, as plans need it."""
    service = replace(topology.service, run_dir=str(topology.run_dir.absolute()), name="", node=topology.node)
    return replace(topology, service=service)
