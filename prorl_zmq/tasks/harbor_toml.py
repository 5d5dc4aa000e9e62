"""`task.toml` of Harbor tasks, schema 1.0 to 1.4: its tables as structs, and as parts of a `HarborTask`.

Each key is obeyed or rejected. `metadata`, `[task]`, `source`, `storage_mb` and `destination` of an artifact have no
effect on a rollout. A value `${NAME:-text}` of a variable becomes `text`: a job depends on its folder alone.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..errors import ConfigError, InvalidRecord
from ..system.settings_file import checked_settings
from ..wire.messages.jobs import McpServer
from .harbor_task import Artifact, Collect, Environment, Healthcheck, NetworkPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NEWEST_SCHEMA = (1, 4)
VERSION = re.compile(r"[0-9]+(\.[0-9]+)*")
TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([GMK])", re.IGNORECASE)
MEGABYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
MAIN_SERVICE = "main"
AGENTS = "[environment]"
"""The table of the agent's sandbox."""
Network = Literal["public", "no-network", "allowlist"]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""


class HealthcheckTable(_Table, frozen=True):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class McpServerTable(_Table, frozen=True):
    name: str
    transport: Literal["stdio", "sse", "http", "streamable-http"] = "sse"
    command: str | None = None
    args: list[str] = []
    url: str | None = None
    headers: dict[str, str] = {}


class EnvironmentTable(_Table, frozen=True):
    network_mode: Network | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str | None = None
    storage_mb: int | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[McpServerTable] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: HealthcheckTable | None = None
    workdir: str | None = None


class CollectTable(_Table, frozen=True):
    command: str
    service: str = MAIN_SERVICE
    timeout_sec: float = 60.0
    user: str | int | None = None


class AgentTable(_Table, frozen=True):
    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: Network | None = None
    allowed_hosts: list[str] | None = None


class VerifierTable(_Table, frozen=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: Network | None = None
    allowed_hosts: list[str] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = []

    def is_separate(self) -> bool | None:
        """Return whether the verifier has a sandbox of its own; None: this table does not say."""
        if self.environment_mode is not None:
            return self.environment_mode == "separate"
        return True if self.environment is not None else None


class SolutionTable(_Table, frozen=True):
    env: dict[str, str] = {}


class ArtifactTable(_Table, frozen=True):
    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class StepTable(_Table, frozen=True):
    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: list[str | ArtifactTable] = []


class TaskToml(_Table, frozen=True):
    schema_version: str = "1.4"
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepTable] = []
    artifacts: list[str | ArtifactTable] = []


@lru_cache(maxsize=64)
def parse_task_toml(text: str) -> TaskToml:
    """Return the file's tables; do not change what is in them. Sets often have the same file in every folder.

    Raises:
        InvalidRecord: it is not TOML, of a later schema, or has an unknown key or an invalid value.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidRecord(f"task.toml is not TOML: {error}", field="task.toml") from error
    if "version" in data:
        data.setdefault("schema_version", data["version"])
        del data["version"]
    _check_schema(data.get("schema_version", "1.4"))
    try:
        return checked_settings(data, TaskToml, "task.toml")
    except ConfigError as error:
        raise InvalidRecord(error.message, field=str(error.fields.get("key", ""))) from error


def environment_of(table: EnvironmentTable, place: str, image: str, source: str) -> Environment:
    """Return the sandbox that a table describes; `place` names the table in errors."""
    _reject_unsupported(table, place)
    megabytes = _megabytes(table.memory, table.memory_mb, place)
    memory = {} if megabytes is None else {"memory_bytes": megabytes * 2**20}
    mode = table.network_mode
    if mode is None:
        mode = "no-network" if table.allow_internet is False and table.allowed_hosts is None else "public"
    return Environment(
        image=image,
        image_source=source,
        workdir=table.workdir or "",
        variables=variables(table.env, f"{place} env"),
        cpus=table.cpus,
        network=_policy(mode, table.allowed_hosts, place),
        healthcheck=healthcheck_of(table.healthcheck),
        **memory,
    )


def network_of(table: AgentTable | VerifierTable, place: str) -> NetworkPolicy | None:
    """Return what a phase may connect to; None: what its sandbox may."""
    if table.network_mode is None:
        if table.allowed_hosts is not None:
            _reject(place, "allowed_hosts", 'it needs network_mode = "allowlist"')
        return None
    return _policy(table.network_mode, table.allowed_hosts, place)


def healthcheck_of(table: HealthcheckTable | None) -> Healthcheck | None:
    if table is None:
        return None
    return Healthcheck(
        command=table.command,
        interval_s=table.interval_sec,
        timeout_s=table.timeout_sec,
        start_period_s=table.start_period_sec,
        start_interval_s=table.start_interval_sec,
        retries=table.retries,
    )


def mcp_servers_of(tables: Sequence[McpServerTable]) -> tuple[McpServer, ...]:
    """Return the agent's MCP servers: programs of its sandbox, and addresses, which the operator must allow."""
    found: list[McpServer] = []
    for table in tables:
        problem, program = "", table.transport == "stdio"
        if table.transport == "sse":
            problem = 'the transport sse, the default of Harbor, is not supported; set transport = "stdio" or "http"'
        elif table.headers:
            problem = "headers are not sent; the operator names a variable with the key in [[mcp]] of the topology file"
        elif program and (not table.command or table.url):
            problem = "stdio needs a command, and no url"
        elif not program and (not table.url or table.command or table.args):
            problem = f"{table.transport} needs a url, and no command"
        elif any(table.name == each.name for each in found):
            problem = "two servers have this name"
        if problem:
            _reject(AGENTS, "mcp_servers", f"{table.name}: {problem}")
        where = {"command": [table.command, *table.args]} if program else {"url": table.url}
        try:
            found.append(msgspec.convert({"name": table.name, **where}, McpServer))
        except msgspec.ValidationError as error:
            _reject(AGENTS, "mcp_servers", f"{table.name}: {error}")
    return tuple(found)


def artifacts_of(entries: Sequence[str | ArtifactTable], place: str) -> tuple[Artifact, ...]:
    found = []
    for entry in entries:
        table = ArtifactTable(entry) if isinstance(entry, str) else entry
        if table.service not in (None, MAIN_SERVICE):
            _reject(place, "service", f"{table.service!r} is a service of docker-compose.yaml, which is not supported")
        if not table.source.startswith("/") or ".." in table.source.split("/"):
            _reject(place, "source", f"{table.source!r} is not an absolute path without '..'")
        found.append(Artifact(table.source, tuple(table.exclude)))
    return tuple(found)


def collect_of(tables: Sequence[CollectTable], place: str) -> tuple[Collect, ...]:
    for table in tables:
        if table.service != MAIN_SERVICE:
            _reject(place, "service", f"{table.service!r} is a service of docker-compose.yaml, which is not supported")
    return tuple(Collect(table.command, table.timeout_sec, user_of(table.user)) for table in tables)


def variables(given: Mapping[str, str], place: str) -> dict[str, str]:
    """Return variables with the defaults of `${NAME:-default}` in place of the templates."""

    def filled(found: re.Match[str]) -> str:
        if found[2] is None:
            raise InvalidRecord(
                f"task.toml: {place} wants the value of ${found[1]} on the host, which every job would carry; write "
                f"${{{found[1]}:-value}} or the value itself",
                field=place,
            )
        return found[2]

    return {name: TEMPLATE.sub(filled, value) for name, value in given.items()}


def user_of(user: str | int | None) -> str:
    return "" if user is None else str(user)


def _check_schema(version: object) -> None:
    numbers = tuple(map(int, str(version).split("."))) if VERSION.fullmatch(str(version)) else ()
    newest = ".".join(map(str, NEWEST_SCHEMA))
    if not isinstance(version, str) or not numbers:
        raise InvalidRecord(
            f'task.toml: schema_version is {version!r}, not a text such as "{newest}"', field="schema_version"
        )
    if numbers > NEWEST_SCHEMA:
        raise InvalidRecord(
            f"task.toml: schema_version {version} is later than {newest}, the newest that this version of prorl-zmq "
            "reads; its keys may mean something else",
            field="schema_version",
        )


def _reject_unsupported(table: EnvironmentTable, place: str) -> None:
    unsupported = {
        "gpus": (table.gpus, "sandboxes have no GPU"),
        "gpu_types": (table.gpu_types, "sandboxes have no GPU"),
        "tpu": (table.tpu, "sandboxes have no TPU"),
        "mcp_servers": (place != AGENTS and table.mcp_servers, "only the agent has MCP servers"),
        "skills_dir": (table.skills_dir, "skills are not copied into an agent's settings"),
        "os": (table.os.lower() != "linux" and table.os, "sandboxes run Linux"),
    }
    for key, (value, reason) in unsupported.items():
        if value:
            _reject(place, key, reason)


def _megabytes(text: str | None, number: int | None, place: str) -> int | None:
    if text is None:
        return number
    found = SIZE.fullmatch(text.strip())
    if found is None:
        _reject(place, "memory", f"{text!r} is not a size such as 2G or 512M")
        return None
    size = int(float(found[1]) * MEGABYTES[found[2].upper()])
    if number not in (None, size):
        _reject(place, "memory", f"{text} is not memory_mb = {number}")
    return size


def _policy(mode: Network, hosts: list[str] | None, place: str) -> NetworkPolicy:
    if hosts and mode != "allowlist":
        _reject(place, "allowed_hosts", f'it needs network_mode = "allowlist", not "{mode}"')
    return NetworkPolicy(mode, tuple(host.strip().lower().rstrip(".") for host in hosts or ()))


def _reject(place: str, key: str, reason: str) -> None:
    raise InvalidRecord(f"task.toml: {place} {key}: {reason}", field=f"{place} {key}")
