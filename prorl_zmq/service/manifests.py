"""Kubernetes manifests of a service: text from options and a topology, without a look at any cluster.

Pods share no folder, so each makes its service folder when it starts: the keys from a Secret (a tar file, which keeps
the files' modes), the topology and the brokers' endpoints from ConfigMaps. The endpoints name the brokers by DNS with
fixed ports, so a broker that moves is found under the same name. The brokers' folder, with the journals, is on a volume
that one pod at a time may mount; a node's is in its container and goes with it.

SIGTERM ends a pod's `prorl serve` or `prorl node`; a node drains first, and Kubernetes waits for as long as `--drain-s`
says and `STOP_S` more. Left out on purpose: what serves the queue's metric to the autoscaler, and several rollout
brokers.
"""

from __future__ import annotations

import base64
import json
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..config import load_topology, parse_topology
from ..errors import ConfigError
from ..system.packed_folder import pack
from ..wire.messages.jobs import Phase

if TYPE_CHECKING:
    from pathlib import Path

    from ..config import Topology

ENDPOINTS = """\
[rollout_broker]
front_door = "tcp://0.0.0.0:5555"
stage_events = "tcp://0.0.0.0:5556"

[backend_broker]
endpoint = "tcp://0.0.0.0:5557"
"""
"""What the topology of a service on Kubernetes has to say; the ports may be others."""
BROKERS_HOST = "prorl-brokers-0.prorl"
"""DNS name of the brokers' pod: StatefulSet, number, headless Service."""
STOP_S = 45
"""A node's own end after its drain: the sum of the supervisor's limits, and some more."""
PARTS = ("service", "node", "client", "operator")
"""Key folders of a service, each for a Secret of its own."""
_EVERYWHERE = re.compile(r"tcp://0\.0\.0\.0:([1-9][0-9]*)")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kKMGTP]i?)?")
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    image: str
    """Container image that has `prorl`, `sh` and `tar`."""
    nodes: int = 2
    """Pods of the nodes' Deployment."""
    every_machine: bool = False
    """A DaemonSet instead: one pod on each machine."""
    autoscale: tuple[int, int] | None = None
    """Fewest and most nodes."""
    drain_s: int = 600
    cpu: str = "16"
    memory: str = "64Gi"
    images_claim: str = ""
    """PersistentVolumeClaim with images of sandboxes, mounted at /images."""

    def __post_init__(self) -> None:
        for flag, value, pattern, such_as in (
            ("--image", self.image, _IMAGE, "registry.example/prorl:0.1"),
            ("--cpu", self.cpu, _QUANTITY, "16"),
            ("--memory", self.memory, _QUANTITY, "64Gi"),
            ("--images-claim", self.images_claim or "none", _CLAIM, "prorl-images"),
        ):
            if not pattern.fullmatch(value):
                raise ConfigError(f"{flag} {value!r}: write it as in {flag} {such_as}", key=flag)


def render(options: ManifestOptions, config: Path | None) -> str:
    """Return the manifests as YAML.

    Raises:
        ConfigError: the topology file is wrong, or other pods could not reach its endpoints.
    """
    topology = load_topology(config) if config is not None else parse_topology(tomllib.loads(ENDPOINTS), "")
    ports = _ports(topology)
    environment = Environment(
        loader=PackageLoader("prorl_zmq.service", "."),
        autoescape=False,  # noqa: S701 - YAML; texts go through `tojson`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("kubernetes.yaml.j2").render(
        options=options,
        topology=(config.read_text(encoding="utf-8") if config is not None else ENDPOINTS).rstrip(),
        brokers=_records(ports),
        ports=ports,
        isolated=topology.sandbox.kind != "process",
        gpus=len({gpu for backends in topology.backends for gpu in backends.gpus}),
        slots=sum(stage.processes * stage.slots for stage in topology.stage if stage.role == Phase.RUN),
        grace_s=options.drain_s + STOP_S,
    )


def secrets(folder: Path) -> str:
    """Return the Secrets with the keys of a service's folder, as JSON for `kubectl apply`."""
    items = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"prorl-keys-{part}", "labels": {"app": "prorl"}},
            "data": {"keys.tar": base64.b64encode(pack(folder, (".prorl-service", f"keys/{part}"))).decode()},
        }
        for part in PARTS
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1)


def _ports(topology: Topology) -> dict[str, int]:
    rollout, backend = topology.rollout_broker, topology.backend_broker
    endpoints = {"front": rollout.front_door, "stages": rollout.stage_events, "backends": backend.endpoint}
    found = {name: _EVERYWHERE.fullmatch(endpoint) for name, endpoint in endpoints.items()}
    if wrong := [endpoints[name] for name, match in found.items() if match is None]:
        raise ConfigError(
            f"other pods cannot reach {', '.join(wrong)}: the topology has to have\n{ENDPOINTS}", key="rollout_broker"
        )
    return {name: int(match[1]) for name, match in found.items() if match is not None}


def _records(ports: dict[str, int]) -> dict[str, str]:
    """Return what the brokers' folder of a node holds: the files that brokers write of themselves, with DNS names."""
    at = {name: f"tcp://{BROKERS_HOST}:{port}" for name, port in ports.items()}
    endpoints = {
        "rollout-0": {"front_door": at["front"], "stage_events": at["stages"]},
        "backends": {"backend_broker": at["backends"]},
    }
    return {
        name: json.dumps({"kind": name.partition("-")[0], "name": name, "endpoints": known, "host": BROKERS_HOST})
        for name, known in endpoints.items()
    }
