"""Kubernetes manifests of a service, rendered from options and a topology; contacts no cluster.

Pods share no folder, so each makes its own at its start: keys from a Secret (a tar file, which keeps modes), the
topology and the brokers' DNS name and fixed ports from ConfigMaps. The brokers' folder is on a volume that one pod at a
time may mount. A node drains on SIGTERM; Kubernetes waits for `--drain-s` and another `STOP_S`.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from ..config import load_topology
from ..errors import ConfigError
from ..system.packed_folder import pack
from ..wire.messages.base import PROTOCOL_VERSION
from .service_folder import BACKENDS, MARKER, Announcement

BROKERS_HOST = "prorl-brokers-0.prorl"
"""DNS name of the brokers' pod: StatefulSet, number, headless Service."""
FIRST_PORT = 5555
"""Of the first rollout broker's front door; the other ports follow."""
STOP_S = 45
"""Seconds for a node's exit after its drain: the sum of the supervisor's limits, with a margin."""
SECRETS = {"service": ("service",), "node": ("node", "client"), "client": ("client",), "operator": ("operator",)}
"""The key folders in each Secret; a node queries the service's status with a client's key."""
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kKMGTP]i?)?")
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    image: str
    """A container image with `prorl`, `sh` and `tar`."""
    nodes: int = 2
    """Pods of the nodes' Deployment."""
    every_machine: bool = False
    """A DaemonSet instead: one pod on each machine."""
    drain_s: int = 600
    cpu: str = "16"
    memory: str = "64Gi"
    images_claim: str = ""
    """PersistentVolumeClaim with sandbox images, mounted at /images."""

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
        ConfigError: the topology file is invalid.
    """
    topology = load_topology(config, Path())
    for file in topology.service.task_modules:
        if not Path(file).is_absolute():
            raise ConfigError(
                f"{config}: service.task_modules names {file}, which no pod has: copy it into the image "
                f"(`COPY {file} /opt/tasks/`), and name it as /opt/tasks/{Path(file).name}",
                key="service.task_modules",
            )
    environment = Environment(
        loader=PackageLoader("prorl_zmq.service", "."),
        autoescape=False,  # noqa: S701 - YAML; texts go through `tojson`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    brokers = _brokers(topology.service.rollout_brokers)
    return environment.get_template("kubernetes.yaml.j2").render(
        options=options,
        topology=config.read_text(encoding="utf-8").rstrip() if config is not None else "# all at its defaults",
        brokers={one.name: msgspec.json.encode(one).decode() for one in brokers},
        brokers_host=BROKERS_HOST,
        ports=[endpoint.rpartition(":")[2] for one in brokers for endpoint in one.endpoints.values()],
        isolated=topology.sandbox.kind != "process",
        gpus=len({gpu for backends in topology.backends for gpu in backends.gpus}),
        grace_s=options.drain_s + STOP_S,
    )


def secrets(folder: Path) -> str:
    """Return the Secrets with the keys of a service's folder, as JSON for `kubectl apply`."""
    items = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"prorl-keys-{name}", "labels": {"app": "prorl"}},
            "data": {
                "keys.tar": base64.b64encode(pack(folder, (MARKER, *(f"keys/{part}" for part in parts)))).decode()
            },
        }
        for name, parts in SECRETS.items()
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1)


def _brokers(number: int) -> list[Announcement]:
    """Return the brokers' announcements for nodes, with the pod's DNS name.

    In the brokers' pod the name is replaced by the pod's address, and a broker binds its previous ports again.
    """
    ports = count(FIRST_PORT)

    def broker(kind: Literal["rollout", "backend"], name: str, *links: str) -> Announcement:
        endpoints = {link: f"tcp://{BROKERS_HOST}:{next(ports)}" for link in links}
        return Announcement(kind, name, endpoints, BROKERS_HOST, 0, 0.0, "", version("prorl-zmq"), PROTOCOL_VERSION)

    rollout = [broker("rollout", f"rollout-{index}", "front_door", "stage_events") for index in range(number)]
    return [*rollout, broker("backend", BACKENDS, "endpoint")]
