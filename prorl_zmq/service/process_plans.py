"""`ProcessPlan`: everything that a process of a service starts with, filled from a topology or a command's flags.

The supervisor passes it as a JSON file in the run folder, which only its user can read.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from ..config import BackendSettings, GatewaySettings, Topology  # noqa: TC001 - msgspec reads the annotations at run time
from ..errors import ConfigError
from ..wire.messages.jobs import Phase  # noqa: TC001 - msgspec reads the annotations at run time

if TYPE_CHECKING:
    from pathlib import Path

PLANS = "plans"
"""The folder of the plans, in the run folder."""
BROKER_RANK, ENGINE_RANK, STAGE_RANK = 0, 1, 2
FORKED_KINDS = ("embedded", "http")
"""Kinds of engines whose hosts import nothing that a fork could not use."""


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="process"):
    """What all processes have. Those that serve, and where, follow in the plans of each kind."""

    name: str
    """Of the process: of its log, of a rollout broker in its service, and of an engine as the brokers list it."""
    topology: Topology
    service: str = ""
    """The folder of a service, which says where the brokers are; empty: none."""

    rank: ClassVar[int] = STAGE_RANK
    """Processes end in descending order of rank: first those that work, last the brokers."""
    program: ClassVar[str] = "prorl"
    """As which it reports errors."""
    serves_http: ClassVar[bool] = False

    @property
    def of_node(self) -> bool:
        """Whether it works for the node alone, and ends with it."""
        return isinstance(self, EnginePlan | StagePlan)

    @property
    def stage_role(self) -> str:
        """The role of a stage process; empty: it is another process."""
        return ""

    @property
    def process(self) -> str:
        """What kind of process it is, as metrics name it."""
        return str(self.__struct_config__.tag)

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        return sys.executable

    @property
    def forked(self) -> bool:
        """Whether it may be a fork of a process that has imported this package; else it is a fresh interpreter."""
        return True

    @property
    def file(self) -> Path:
        return self.topology.run_dir / PLANS / f"{self.name}.{self.process}.json"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those of the interpreter."""
        return ("-m", "prorl_zmq.cli", "prorl-child", str(self.file))

    def write(self) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        part = self.file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self))
        part.replace(self.file)


class BrokerPlan(ProcessPlan, frozen=True, kw_only=True, tag="broker"):
    kind: Literal["rollout", "backend", "node"]
    """The node of a node's broker is the topology's."""
    address: str = ""
    """Of a service with a folder: this machine's, at which other nodes reach it."""

    rank: ClassVar[int] = BROKER_RANK

    @property
    def process(self) -> str:
        return f"{self.kind}_broker"

    @property
    def of_node(self) -> bool:
        return self.kind == "node"


class EnginePlan(ProcessPlan, frozen=True, kw_only=True, tag="engine"):
    backend: BackendSettings
    """One engine: `gpus`, `cores` and `urls` are its own."""
    connect: str = ""
    """The backend broker; empty: as the service's folder says."""
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
    """Serve these only; empty: all that are installed."""

    program: ClassVar[str] = "prorl-stage"

    @property
    def stage_role(self) -> str:
        return self.role

    @property
    def process(self) -> str:
        return f"stage_{self.role}"


class HttpPlan(ProcessPlan, frozen=True, kw_only=True, tag="http"):
    """The gateway, the dashboard, or what serves the metrics of this run folder alone."""

    serves: Literal["gateway", "dashboard", "metrics"]
    settings: GatewaySettings
    front_door: str = ""
    """Empty: as the service's folder says."""
    gateway: str = ""
    """Name of this gateway; empty: made of host and port."""
    timeout_s: float = 10.0
    """How long the service may take to answer."""

    serves_http: ClassVar[bool] = True

    @property
    def process(self) -> str:
        return self.serves


AnyPlan = BrokerPlan | EnginePlan | StagePlan | HttpPlan


def read_plan(path: Path) -> AnyPlan:
    """Read a process's plan.

    Raises:
        ConfigError: the file cannot be read, or is no plan of this version of the package.
    """
    try:
        plan: AnyPlan = msgspec.json.decode(path.read_bytes(), type=AnyPlan)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", key="plan") from error
    except msgspec.MsgspecError as error:
        words = "the interpreter that reads it needs the version of prorl-zmq that wrote it"
        raise ConfigError(f"{path} is no plan of a process: {error}; {words}", key="plan") from error
    return plan


def pinned(topology: Topology) -> Topology:
    """Return a topology whose run folder and node are named in full, as a plan needs it."""
    service = replace(topology.service, run_dir=str(topology.run_dir.absolute()), name="", node=topology.node)
    return replace(topology, service=service)
