"""`prorl dashboard`."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec.structs import replace

from ..config import SecuritySettings
from ..service.child_plans import dashboard_settings
from ..service.process_plans import HttpPlan
from . import options
from .children import run
from .option_groups import LogOptions
from .target import Target

BIND = "127.0.0.1:8787"


def dashboard(
    target: Target,
    process: LogOptions,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help=f"Where to listen. [default: --config's; {BIND}]")
    ] = "",
    runs: options.Runs = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Change nothing: no button cancels or drains.")
    ] = False,
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    insecure: options.Insecure = False,
) -> None:
    """Serve a page for the browser: a live view of a service, its jobs one by one, and evaluations side by side.

    prorl dashboard

    prorl dashboard --runs eval

    It prints its address and runs until Ctrl-C. The address holds a key that only you can read, since others may be on
    this machine; where the folder of --keys has bearer tokens (`prorl keys bearer NAME --role operator`), viewers
    need one of these. Over TCP the dashboard's own key is an operator's.
    From elsewhere, use `ssh -L 8787:127.0.0.1:8787 HOST`; with --tls-cert and --tls-key it can listen beyond
    loopback.
    """
    topology = target.topology
    keys = str(target.keys or topology.security.keys)
    listens, shown = dashboard_settings(topology), topology.dashboard
    topology = process.applied(replace(topology, service=replace(topology.service, insecure=insecure)))
    topology = replace(
        topology,
        security=SecuritySettings(keys),
        dashboard=replace(shown, runs=str(runs or shown.runs), read_only=read_only or shown.read_only),
    )
    run(
        HttpPlan(
            name="dashboard",
            serves="dashboard",
            topology=topology,
            service=str(target.folder or ""),
            settings=replace(
                listens,
                bind=bind or listens.bind or BIND,
                tls_cert=tls_cert or listens.tls_cert,
                tls_key=tls_key or listens.tls_key,
            ),
            front_door=target.front_door,
        )
    )
