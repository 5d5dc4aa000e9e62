"""Instances of the `harbor` task: a Harbor task folder as plain data, which any node can run.

A job carries the files that judge the agent (`tests`) as packed folders, so no stage process reads the task folder.
The files of `environment/` are in the image. A task without `[[steps]]` has one step, whose name is empty.
"""

from __future__ import annotations

import math
from ipaddress import ip_network
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..wire.messages.jobs import McpServer  # noqa: TC001 - msgspec reads it

NetworkMode = Literal["public", "no-network", "allowlist"]
PackedFolder = bytes
"""A gzip-compressed tar file of a folder's content, paths relative to the folder; empty: no files. It has regular
files, folders, and symbolic links that stay inside. In JSON it is base64 text."""
User = Annotated[str, Meta(pattern=r"^([a-z_][a-z0-9_-]{0,31}\$?|[0-9]{1,10})?\Z")]
"""A user's name or number; empty: the user of the sandbox (root in an Apptainer image)."""
Directory = Annotated[str, Meta(pattern=r"^/[^\x00]*\Z")]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
Variables = dict[Annotated[str, Meta(pattern=r"^[^=\x00]+\Z")], Annotated[str, Meta(pattern=r"^[^\x00]*\Z")]]
PACKED_LIMIT_BYTES = 3 * 2**20
"""Most bytes of all packed folders of an instance; a job may have 4 MiB by default."""


class NetworkPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the commands of one phase may connect to."""

    mode: NetworkMode = "no-network"
    allowed_hosts: tuple[str, ...] = ()
    """For `allowlist`: host names, `*.` and a domain, addresses, and networks such as `192.0.2.0/24`."""

    def __post_init__(self) -> None:
        if self.allowed_hosts and self.mode != "allowlist":
            raise ValueError("allowed_hosts needs the network mode allowlist")

    def is_wider_than(self, other: NetworkPolicy) -> bool:
        """Return whether a policy allows connections that another does not."""
        if self == other or self.mode == "no-network":
            return False
        more = set(self.allowed_hosts) - set(other.allowed_hosts)
        if other.mode == "public":
            return any(map(_is_address, more))  # such as private ones
        return self.mode == "public" or bool(more)


class Healthcheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A command that must succeed before the agent starts, as Docker's HEALTHCHECK."""

    command: str
    interval_s: Seconds = 5.0
    timeout_s: Seconds = 30.0
    start_period_s: float = 0.0
    """Seconds in which failures do not count as retries."""
    start_interval_s: Seconds = 5.0
    retries: Annotated[int, Meta(ge=1, le=1000)] = 3


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sandbox of the agent, or of a separate verifier."""

    image: str = ""
    """The root filesystem, as `prorl image list` names it; empty: the service's default."""
    image_source: str = ""
    """Where the image comes from, such as `docker://ubuntu:24.04`: the source for `prorl tasks images`."""
    workdir: Directory | Literal[""] = ""
    """Where commands start; empty: the image's WORKDIR as the converter stored it, else `/`."""
    variables: Variables = {}
    cpus: Annotated[float, Meta(gt=0, le=4096)] | None = None
    memory_bytes: Annotated[int, Meta(ge=2**26, le=2**42)] = 4 * 2**30
    network: NetworkPolicy = NetworkPolicy()
    healthcheck: Healthcheck | None = None


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file or folder of the agent's sandbox that a separate verifier gets, at the same path."""

    source: Directory
    exclude: tuple[str, ...] = ()
    """Patterns of paths that are left out, as of `tar --exclude`."""


class Collect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A command that runs in the agent's sandbox after the agent, before artifacts are collected."""

    command: str
    timeout_s: Seconds = 60.0
    user: User = ""


class Verifier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the verifier of one step runs."""

    timeout_s: Seconds = 600.0
    user: User = ""
    variables: Variables = {}
    network: NetworkPolicy | None = None
    """None: as in the sandbox in which it runs."""
    separate: Environment | None = None
    """A fresh sandbox for the verifier, with the artifacts; None: the agent's sandbox."""
    tests_in_image: bool = False
    """The image of the separate verifier has `/tests`, so that none are copied."""
    collect: tuple[Collect, ...] = ()


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One instruction, one run of the agent, one verification."""

    instruction: Annotated[str, Meta(min_length=1)]
    name: str = ""
    """Its folder below `steps/`; empty: the task has no steps."""
    agent_s: Seconds | None = None
    """Longest run of the agent; the job's `limits.run_s` applies too."""
    agent_user: User = ""
    agent_network: NetworkPolicy | None = None
    """None: as the environment's."""
    tests: PackedFolder = b""
    """Copied into `/tests` over the task's own tests."""
    workdir: PackedFolder = b""
    """Copied into the working directory before the step; its `setup.sh`, if any, then runs there."""
    verifier: Verifier = Verifier()
    min_reward: dict[str, float] = {}
    """The least reward by name (`reward`: the main one) with which the next step begins."""
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()
    """In addition to the task's."""
    solution: PackedFolder = b""
    """Only for `prorl tasks oracle`: has `solve.sh`."""

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.min_reward.values())):
            raise ValueError("min_reward must be finite")


class HarborTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One Harbor task."""

    name: str
    """The task folder's name."""
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=64)]
    """In their order; a task without steps has one, whose name is empty."""
    environment: Environment = Environment()
    tests: PackedFolder = b""
    """The content of `tests/`; it enters the sandbox after the agent."""
    solution: PackedFolder = b""
    """The content of `solution/`, only for `prorl tasks oracle`: an ordinary job does not carry it."""
    solution_variables: Variables = {}
    artifacts: tuple[Artifact, ...] = ()
    reward: Literal["mean", "final"] = "mean"
    """The reward of several steps: the mean of those that were graded, by name, or the last one's."""
    live: bool = False
    """The verifier looks at processes that the agent started, such as a server. They then run while it grades and could
    interfere with it; otherwise they are ended before the tests enter. They have the verifier's network too, so it must
    not be wider than the agent's."""
    tools: tuple[Literal["bash", "ipython", "str_replace_editor", "think", "finish"], ...] = (
        "bash",
        "str_replace_editor",
        "finish",
    )
    """The agent's tools, unless a harness leads the rollout."""
    mcp: Annotated[tuple[McpServer, ...], Meta(max_length=16)] = ()
    """Servers whose tools the agent gets in addition to those of `Job.mcp`."""
    system: str = ""
    """The system message; empty: the task's own, which names the working directory."""

    def __post_init__(self) -> None:
        packed = len(self.tests) + len(self.solution)
        packed += sum(len(step.tests) + len(step.workdir) + len(step.solution) for step in self.steps)
        if packed > PACKED_LIMIT_BYTES:
            raise ValueError(f"its packed folders have {packed} bytes; a job carries at most {PACKED_LIMIT_BYTES}")
        names = [step.name for step in self.steps]
        if len(set(names)) != len(names) or ("" in names and len(names) > 1):
            raise ValueError("each step needs a name of its own")
        if len(self.steps) > 1 and (programs := [server.name for server in self.mcp if server.command]):
            raise ValueError(
                f"the MCP server {programs[0]} would end with the agent's processes after the first step: a task with "
                "several steps can only have servers with a url"
            )
        for step in self.steps if self.live else ():
            agents = step.agent_network or self.environment.network
            verifiers = step.verifier.network or self.environment.network
            if step.verifier.separate is None and verifiers.is_wider_than(agents):
                raise ValueError(
                    f"its tests look at processes of the agent, which would also get the verifier's wider network "
                    f"({verifiers.mode}; the agent's is {agents.mode}): give both one network_mode, set "
                    'environment_mode = "separate" in [verifier], or live = false in [metadata] of task.toml'
                )


def _is_address(host: str) -> bool:
    try:
        ip_network(host)
    except ValueError:
        return False
    return True
