"""`prorl k8s`: manifests for Kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from . import options

commands = typer.Typer(
    help="Write manifests of a service on Kubernetes, for `kubectl apply`. These commands use no cluster.",
    rich_markup_mode=None,
)


@commands.command("render")
def render(
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image with prorl_zmq and its server extra.")],
    config: options.Config = None,
    nodes: Annotated[int | None, typer.Option(min=0, max=5000, help="Pods that run nodes. [default: 2]")] = None,
    daemon_set: Annotated[bool, typer.Option("--daemon-set", help="Run one node on each machine instead.")] = False,
    drain_s: Annotated[int, typer.Option(min=0, max=86400, help="Most seconds that a node may take to end.")] = 600,
    cpu: Annotated[str, typer.Option(help="What a node's pod requests.")] = "16",
    memory: Annotated[str, typer.Option(help="What a node's pod requests.")] = "64Gi",
    images_claim: Annotated[
        str, typer.Option(metavar="NAME", help="A PersistentVolumeClaim with images, for /images of nodes.")
    ] = "",
) -> None:
    """Print the manifests of a service: brokers, nodes, and what they read when they start.

    The topology file says what one node runs. `prorl k8s keys` makes the keys, which the manifests only name.
    """
    from ..service.manifests import ManifestOptions
    from ..service.manifests import render as render_manifests

    if nodes is not None and daemon_set:
        raise ConfigError("--nodes and --daemon-set exclude each other: give one of them", key="--nodes")
    given = ManifestOptions(
        image=image,
        nodes=2 if nodes is None else nodes,
        every_machine=daemon_set,
        drain_s=drain_s,
        cpu=cpu,
        memory=memory,
        images_claim=images_claim,
    )
    print(render_manifests(given, config), end="")


@commands.command("keys")
def keys(
    service: Annotated[Path, typer.Option(metavar="DIR", help="The folder with all keys; made if it is missing.")],
    config: options.Config = None,
) -> None:
    """Print the Secrets with a service's keys; they are for `kubectl apply -f -` only.

    The folder stays with you: the same keys are printed each time. --config is that of `prorl k8s render`.
    """
    from ..service.manifests import secrets
    from ..service.service_folder import ServiceFolder

    if sys.stdout.isatty():
        raise ConfigError("this would show secret keys: prorl k8s keys --service DIR | kubectl apply -f -", key="keys")
    made = ServiceFolder.is_made(service)
    print(secrets((ServiceFolder.open(service) if made else ServiceFolder.create(service, config)).path))
