"""The topology: which processes a service has, and where their sockets are. One TOML file, checked as a whole.

Endpoints are strings, never code: `ipc://` within a node, `tcp://` across nodes. `{run_dir}` in an endpoint stands for
the service's private folder of sockets. Every table and key has a default, so an empty file is a working service.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .errors import ConfigError, ProrlError
from .system.http_address import http_address
from .system.logs import LogFormat, LogLevel, keep_secret
from .system.node_name import default_node
from .system.plugins import load_plugin, offered
from .system.run_folder import own_run_dir
from .system.run_places import NAME_PATTERN, base_run_dir, name_of_environment, named_run_dir
from .system.settings_file import checked_settings, read_toml
from .wire.messages.base import JOB_LIMIT_BYTES, POLICY, Count, ModelName, Seconds
from .wire.messages.chat import History, ParserUrl, TemplateArguments, ToolCallFormatName  # noqa: TC001 - msgspec reads the annotations at run time
from .wire.messages.jobs import Phase, SandboxKind
from .wire.messages.stages import Keep  # noqa: TC001 - msgspec reads the annotations at run time
from .wire.sockets import check_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

ServerApi = Literal["auto", "vllm", "completions", "sglang", "prorl"]
"""What an inference server speaks: vLLM's token API, its `/v1/completions`, SGLang's `/generate`, or that of ProRL's
token servers."""


SessionPattern = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:*?!\[\]-]{1,128}\Z")]
"""Other characters are in no session's name, so such a pattern would fit none."""

SERVICE_VARIABLE = "PRORL_SERVICE_ID"
"""Environment variable that names one life of `prorl serve` to its children."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the tables of a topology file."""


class ServiceSettings(Section, frozen=True):
    """`[service]`: what all processes of a node share."""

    run_dir: str = ""
    """Folder of sockets, sandboxes and logs, made private (0700). Empty: one per user under the system's /tmp."""
    name: Annotated[str, Meta(pattern=rf"^(?:{NAME_PATTERN})?\Z")] = ""
    """The service's name, which is added to `run_dir`, so that two services of a user do not meet. Empty: that of
    `$PRORL_NAME`, or none."""
    node: Annotated[str, Meta(pattern=r"^(?:[A-Za-z0-9_][A-Za-z0-9._:-]{0,99})?\Z")] = ""
    """The node's name; a job's phases that share a sandbox run on one node. Empty: of host and allocation."""
    rollout_brokers: Annotated[int, Meta(ge=1, le=64)] = 1
    """How many rollout brokers a service of `prorl serve --service` has; fixed when its folder is made."""
    task_modules: tuple[str, ...] = ()
    """Python files with tasks of your own, which all stage processes serve besides those of the installed packages. A
    path that is not absolute begins at the topology file, and `prorl serve --service` copies such files."""
    insecure: bool = False
    """Allow plaintext TCP beyond loopback."""
    log_format: LogFormat = "text"
    """How all processes write their logs: text for people, or one JSON object per line."""
    log_level: LogLevel = "info"
    """The lowest level that is logged; `debug` has every transition of every job."""


class SecuritySettings(Section, frozen=True):
    """`[security]`: keys for connections over TCP."""

    keys: str = ""
    """The key folder (see `prorl keys`). Empty: that of `$PRORL_KEYS`, and without it plaintext on loopback only."""


class RolloutBrokerSettings(Section, frozen=True):
    """`[rollout_broker]`: the front door, the job table and the stages' events."""

    front_door: str = "ipc://{run_dir}/front_door"
    """Where trainers connect."""
    stage_events: str = "ipc://{run_dir}/stage_events"
    """Where stage processes connect."""
    max_jobs: Count = 100_000
    """Jobs and uncollected results held at once; beyond it, submissions are answered `busy`."""
    max_held_bytes: Annotated[int, Meta(ge=2**20)] = 2**34
    """Bytes of jobs held at once, and of uncollected trajectories; beyond it, submissions are answered `busy`, and no
    further sandboxes are prepared."""
    max_session_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """The part of both that one session may take of what other sessions leave."""
    session_weights: dict[SessionPattern, Annotated[float, Meta(gt=0, le=1_000_000)]] = {}
    """Shares of the slots, by session: the first pattern that fits its name counts (`*` and `?` as in a shell); others
    have weight 1. That of a batch is multiplied by it."""
    session_priorities: dict[SessionPattern, Annotated[int, Meta(ge=-1000, le=1000)]] = {}
    """Which sessions go first, by patterns as above; others have priority 0. While jobs of a higher priority wait,
    those of lower ones do not start."""
    job_limit_bytes: Annotated[int, Meta(ge=1024, le=256 * 2**20)] = JOB_LIMIT_BYTES
    ready_limit: Count = 64
    """Sandboxes that INIT prepares ahead of RUN."""
    heartbeat_s: Seconds = 1.0
    """How often stage processes report."""
    lease_s: Seconds = 10.0
    """How long a silent stage process keeps its jobs."""
    journal: str = "{run_dir}/rollout.journal"
    """File of the jobs and results that survive a restart. Empty: in memory, so that a restart loses them."""
    journal_limit_bytes: Annotated[int, Meta(ge=2**20)] = 16 * 2**30
    """Largest size of that file and of the segments next to it, which hold trajectories until they are collected."""
    journal_sync: bool = False
    """Wait for the disk at each commit, so that a power loss loses nothing either."""
    keep_collected_bytes: Annotated[int, Meta(ge=0)] = 64 * 2**20
    """Memory for what was collected last, so that it can still be looked at; 0: nothing."""
    keep: Keep = "broker"
    """Where trajectories are until they are collected. `broker`: in the journal, so that the loss of a node loses none.
    `node`: on the node's own disk, and clients fetch them there; if they are lost with it, their jobs run again. Only
    nodes of a service with a folder keep any; their brokers need to be reached by clients."""


class BackendBrokerSettings(Section, frozen=True):
    """`[backend_broker]`: which inference backend each job talks to."""

    endpoint: str = "ipc://{run_dir}/backend_broker"
    lease_s: Seconds = 10.0
    """How long a silent stage process keeps its assignments, and a silent engine host its registration."""
    affinity: Literal["job", "group"] = "job"
    """What stays on one backend: each job by itself, or all jobs of a group, as long as the backend has room."""
    schedule: Literal["kv", "slots"] = "kv"
    """What limits the jobs of a backend. `kv`: what its KV cache can hold, as its host finds out; more jobs wait. An
    engine that reports nothing of its cache is scheduled by its slots. `slots`: no limit; a backend that has as many
    jobs as slots gets more only if the others have too."""


class StageSettings(Section, frozen=True):
    """One `[[stage]]`: a number of equal stage processes."""

    role: Phase
    processes: Annotated[int, Meta(ge=1, le=1024)] = 1
    slots: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Jobs that one process works on at a time."""


STAGES = (StageSettings(Phase.INIT), StageSettings(Phase.RUN), StageSettings(Phase.EVAL))


class LoraSlots(Section, frozen=True):
    """`lora` of `[[backends]]`: the adapters that an engine takes, as models of their own."""

    slots: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Adapters that generate at the same time; requests of others wait for a slot."""
    rank: Annotated[int, Meta(ge=1, le=512)] = 32
    """Largest rank. vLLM reserves memory for `slots` adapters of it."""


class BackendSettings(Section, frozen=True, kw_only=True):
    """One `[[backends]]`: inference engines that the service starts itself, or servers that run already."""

    name: ModelName = POLICY
    """The name by which jobs select their model. `policy` is trained; tasks may talk to others too, such as `user`."""
    frozen: bool = False
    """They keep their weights: weight updates skip them."""
    kind: str = "embedded"
    """An engine kind of an installed package (entry points `prorl_zmq.engines`); each takes some of what follows."""
    model: str = ""
    """`embedded`: an .npz file, or empty for the base policy that comes with the package. `vllm` and `transformers`: a
    directory or a hub name."""
    count: Annotated[int, Meta(ge=1, le=64)] = 1
    """Engines of this kind; not for `http`."""
    urls: tuple[str, ...] = ()
    """`http`: one server each, such as `http://gpu-7:8000`."""
    api: ServerApi = "auto"
    """`http`: what the servers speak; `auto` asks them."""
    gpus: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """`vllm`: GPU ids, dealt out evenly in order; empty: what vLLM sees."""
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """CPU cores, dealt out evenly in order; empty: all."""
    weights_dir: str = ""
    """A folder on a local disk for a copy of the weights, which engines of the same name on a machine share; the
    servers of `http` see it at the same path. Empty: engines read full versions where the trainer wrote them, and
    deltas are applied in the run folder."""
    arguments: tuple[str, ...] = ()
    """`vllm`: vLLM's own flags, such as `["--max-model-len", "32768"]`."""
    python: str = ""
    """The interpreter of another environment, which has vLLM and this package; empty: the service's own."""
    tokenizer: str = ""
    """The directory of the tokenizer and chat template, as stage processes see it; empty: the model's."""
    tool_calls: ToolCallFormatName = ""
    """How the model writes tool calls; empty: as its template does."""
    history: History = "template"
    """What happens where the template changes earlier turns: `template` follows it, in a new segment of the trajectory;
    `append` keeps what the engine saw."""
    template_arguments: TemplateArguments = {}
    """Given to the chat template, such as `{ enable_thinking = false }`; a job may give others. `prorl doctor --model`
    lists those that a template looks at."""
    parser_url: ParserUrl = ""
    """A server of `vllm launch render` such as `http://cpu-1:8100`, as stage processes reach it: its parsers read what
    the policy says to a harness. The agent loop reads by the formats above. Empty: that is done for harnesses too."""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """How many jobs each takes, relative to other backends."""
    max_in_flight: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Jobs at once beyond which one counts as full, and the most of one that reports on its KV cache; 0: the engine's
    own number."""
    context_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """`http`: most tokens of a prompt and its answer together, for servers that do not say; 0: not known."""

    lora: LoraSlots | None = None
    """`vllm`, `http` and `transformers`: adapters that the engines take, such as `{ slots = 8, rank = 32 }`."""

    options: dict[str, Any] = {}
    """More options, for an engine kind of another package."""

    @property
    def engines(self) -> int:
        """How many engine hosts these are."""
        return len(self.urls) or self.count

    def each(self) -> list[BackendSettings]:
        """Return the settings of each engine, with its own URL, GPUs and cores."""
        whole, engines = {name: getattr(self, name) for name in ("urls", "gpus", "cores")}, self.engines

        def part(at: int) -> dict[str, Any]:
            return {name: ids[len(ids) * at // engines : len(ids) * (at + 1) // engines] for name, ids in whole.items()}

        return [msgspec.structs.replace(self, count=1, **part(at)) for at in range(engines)]

    def check(self, spelled: Callable[[str], str] = str) -> list[Any]:
        """Return the `EngineKind` of each engine, with its options; `spelled` says how messages spell a key.

        Raises:
            ConfigError: no installed package offers the kind, or it does not take an option (`key`), or lacks it.
        """
        given = {name: value for name in ENGINE_OPTIONS if (value := getattr(self, name)) != _DEFAULTS[name]}
        urls = [{"url": url} for url in self.urls] or [{}]
        return [_engine_options(self.kind, {**given, **self.options, **url}, spelled) for url in urls]


ENGINE_KINDS = "prorl_zmq.engines"
ENGINE_OPTIONS = (
    *("model", "api", "arguments", "tokenizer", "tool_calls", "history", "template_arguments", "parser_url"),
    *("context_tokens", "lora"),
)
"""Keys of `[[backends]]` that are options of some engine kinds; all engines take the others."""
_DEFAULTS = msgspec.structs.asdict(BackendSettings())


def _engine_options(kind: str, given: dict[str, Any], spelled: Callable[[str], str]) -> Any:
    """Check an engine's options: the fields of its kind, which this file knows by its entry point only."""

    def word(option: str) -> str:
        return spelled("urls" if option == "url" else option)

    chosen = engine_kind(kind)
    subject = f"{spelled('kind')} {kind}"
    fields = {field.name: field for field in msgspec.structs.fields(chosen)}
    for option in given.keys() - fields:
        takers = [name for name in offered(ENGINE_KINDS) if option in _options_of(name)]
        only = f"; {_enumerated(takers)} would" if takers else f"; it takes {', '.join(map(word, fields)) or 'none'}"
        raise ConfigError(f"{subject} takes no {word(option)}{only}", key=option)
    for option, field in fields.items():
        if field.required and option not in given:
            meta = msgspec.inspect.type_info(field.type)
            about = getattr(meta, "extra_json_schema", None) or {}
            what = f": {about['description']}" if "description" in about else ""
            raise ConfigError(f"{subject} needs {word(option)}{what}", key=option)
    try:
        return msgspec.convert(given, chosen)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        option = where.rstrip("`")
        raise ConfigError(f"{subject}: {what}" + (f" in {word(option)}" if option else ""), key=option) from error


def _enumerated(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _options_of(kind: str) -> tuple[str, ...]:
    try:
        fields: tuple[str, ...] = engine_kind(kind).__struct_fields__
    except ConfigError:  # of another package, and not what is asked about
        return ()
    return fields


def engine_kind(kind: str) -> Any:
    return load_plugin(ENGINE_KINDS, kind, "engine", base="prorl_zmq.inference.engine_kind:EngineKind")


class SandboxSettings(Section, frozen=True):
    """`[sandbox]`: what the tools of a job act in."""

    kind: SandboxKind = "bubblewrap"
    """`process` isolates nothing, and has to be asked for by name."""
    image: str = ""
    """The root filesystem of sandboxes whose task names none: a directory, or a SIF file (kind `apptainer`, which
    needs one). Empty: the host's /usr, or for `process` the host itself."""
    image_folders: tuple[str, ...] = ()
    """Folders below which jobs may name images, as in that of `prorl image build`. Jobs see all that is in them."""


class GatewaySettings(Section, frozen=True):
    """`[gateway]`: the HTTP gateway, for clients without ZeroMQ and for those of ProRL Agent's REST API."""

    bind: str = ""
    """HOST:PORT where it listens; empty: there is none. Beyond loopback it wants TLS and keys."""
    tls_cert: str = ""
    """File of the certificate, with what it was signed by; PEM."""
    tls_key: str = ""
    """File of its private key; PEM."""
    use_llm_servers: bool = True
    """`/add_llm_server` starts an engine host for the server that it names; False: it is ignored."""
    tokenizer: str = ""
    """The tokenizer of such servers; empty: what the client names, or the server's own model."""


class DashboardSettings(Section, frozen=True):
    """`[dashboard]`: the page in the browser, in a process of its own; a `[gateway]` has it at its own address too."""

    bind: str = ""
    """HOST:PORT where it listens; empty: it does not. Beyond loopback it wants `[gateway]`'s TLS, and keys."""
    runs: str = ""
    """The folder whose `prorl eval` folders it compares; empty: none."""
    read_only: bool = False
    """It shows everything and changes nothing, for all roles."""


class MetricsSettings(Section, frozen=True):
    """`[metrics]`: where Prometheus finds what a machine's processes count. A gateway has the same at `/metrics`."""

    bind: str = ""
    """HOST:PORT, on every node; empty: there is none. Beyond loopback it wants TLS and keys, as a gateway does."""
    tls_cert: str = ""
    tls_key: str = ""


class McpSettings(Section, frozen=True, kw_only=True):
    """One `[[mcp]]`: an MCP server that runs already and that jobs may name by its address."""

    url: Annotated[str, Meta(pattern=r"^https?://\S+\Z")]
    """Where it speaks streamable HTTP, as stage processes reach it."""
    key_variable: str = ""
    """The environment variable of stage processes that holds its key, which is sent as a bearer token; empty: none."""

    def key(self) -> str:
        """Return the key; a `ConfigError` if the variable is not set, or to no key."""
        found = os.environ.get(self.key_variable, "").strip() if self.key_variable else ""
        if self.key_variable and not (found.isascii() and found.isprintable() and found):
            raise ConfigError(f"set {self.key_variable} to the key of {self.url}: plain ASCII", key="mcp.key_variable")
        keep_secret(found)
        return found


class Topology(Section, frozen=True):
    """A whole topology file."""

    service: ServiceSettings = ServiceSettings()
    security: SecuritySettings = SecuritySettings()
    rollout_broker: RolloutBrokerSettings = RolloutBrokerSettings()
    backend_broker: BackendBrokerSettings = BackendBrokerSettings()
    stage: tuple[StageSettings, ...] = STAGES
    backends: tuple[BackendSettings, ...] = (BackendSettings(),)
    sandbox: SandboxSettings = SandboxSettings()
    gateway: GatewaySettings = GatewaySettings()
    dashboard: DashboardSettings = DashboardSettings()
    metrics: MetricsSettings = MetricsSettings()
    mcp: tuple[McpSettings, ...] = ()

    def __post_init__(self) -> None:  # a model other than the policy may be a teacher
        if self.stage is STAGES and any(one.name != POLICY for one in self.backends):
            msgspec.structs.force_setattr(self, "stage", (*STAGES, StageSettings(Phase.SCORE, slots=64)))

    @property
    def run_dir(self) -> Path:
        """The service's private folder."""
        base = Path(self.service.run_dir).expanduser() if self.service.run_dir else base_run_dir()
        return named_run_dir(base, self.service.name)

    @property
    def node(self) -> str:
        """The node's name; makes the run folder if it has to be named after that."""
        return self.service.node or default_node(own_run_dir(self.run_dir))

    @property
    def journal(self) -> Path | None:
        """The rollout broker's journal; None: in memory."""
        template = self.rollout_broker.journal
        return Path(template.replace("{run_dir}", str(self.run_dir))).expanduser() if template else None

    def endpoint(self, template: str) -> str:
        """Return an endpoint of this file with `{run_dir}` filled in, checked.

        Raises:
            InvalidEndpoint: it is malformed, or its path is too long for ipc.
        """
        return check_endpoint(template.replace("{run_dir}", str(self.run_dir)))


def load_topology(path: Path | None, modules: Path | None = None) -> Topology:
    """Read and check a topology file; without one, return the defaults. `$PRORL_NAME` counts if it names no service.

    Paths of task modules are completed by the folder `modules`; None: that of the file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an unknown key or a wrong value (`key` names it).
    """
    topology = parse_topology(read_toml(path), str(path)) if path is not None else Topology()
    service, folder = topology.service, modules or (path.absolute().parent if path is not None else Path())
    files = tuple(str(folder / Path(file).expanduser()) for file in service.task_modules)
    named = msgspec.structs.replace(service, name=service.name or name_of_environment(), task_modules=files)
    return msgspec.structs.replace(topology, service=named)


def parse_topology(data: dict[str, object], source: str) -> Topology:
    """Check the content of a topology file, which errors call `source`.

    Raises:
        ConfigError: it has an unknown key or a wrong value (`key` names it).
    """
    if isinstance(data.get("backends"), dict):  # [backends] is one [[backends]]
        data = {**data, "backends": [data["backends"]]}
    topology = checked_settings(data, Topology, source, "`prorl init` writes a file with all keys")
    _check_endpoints(topology, source)
    for section in ("gateway", "dashboard", "metrics"):
        if bind := getattr(topology, section).bind:
            key = f"{section}.bind"
            http_address(bind, f"{source}: {key}: ", key)
    for index, backends in enumerate(topology.backends):
        _check_backends(backends, f"backends[{index}]", source)
    if topology.rollout_broker.lease_s < 2 * topology.rollout_broker.heartbeat_s:
        key = "rollout_broker.lease_s"
        raise ConfigError(f"{source}: {key} must be at least twice heartbeat_s, or live processes lose jobs", key=key)
    return topology


def _check_endpoints(topology: Topology, source: str) -> None:
    taken: dict[str, str] = {}
    for key, template in (
        ("rollout_broker.front_door", topology.rollout_broker.front_door),
        ("rollout_broker.stage_events", topology.rollout_broker.stage_events),
        ("backend_broker.endpoint", topology.backend_broker.endpoint),
    ):
        try:
            endpoint = topology.endpoint(template)
        except ProrlError as error:
            raise ConfigError(f"{source}: {key}: {error.message}", key=key) from error
        except RuntimeError as error:  # `~` of a user without a home directory
            raise ConfigError(f"{source}: service.run_dir: {error}", key="service.run_dir") from error
        if endpoint in taken:
            raise ConfigError(f"{source}: {key} and {taken[endpoint]} are the same endpoint", key=key)
        taken[endpoint] = key


def _check_backends(backends: BackendSettings, key: str, source: str) -> None:
    def refuse(name: str, why: str) -> ConfigError:
        return ConfigError(f"{source}: {key}.{name}: {why}", key=f"{key}.{name}")

    if backends.urls and backends.count != 1:
        raise refuse("count", "there is one engine host for each of `urls`")
    for name, ids in (("gpus", backends.gpus), ("cores", backends.cores)):
        if len(ids) % backends.engines:
            raise refuse(name, f"{len(ids)} of them cannot be dealt out evenly to {backends.engines} engines")
        if len(set(ids)) != len(ids):
            raise refuse(name, "one of them is named twice")
    if backends.python and backends.kind not in offered(ENGINE_KINDS):
        return  # that environment may have it; its engine host checks
    try:
        backends.check()
    except ConfigError as error:
        name = str(error.fields.get("key", ""))
        raise refuse("urls" if name == "url" else name, error.message) from error
