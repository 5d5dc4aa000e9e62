"""`prorl dashboard`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..config import GatewaySettings, own_run_dir
from ..security.keys import VARIABLE, named_folder
from ..service.service_folder import ServiceFolder
from . import options

BIND = "127.0.0.1:8787"


def dashboard(
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help=f"Where to listen. [default: --config's; {BIND}]")
    ] = "",
    runs: options.Runs = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Show, and change nothing: no button cancels or drains.")
    ] = False,
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    connect: options.Connect = None,
    config: options.Config = None,
    run_dir: options.RunDir = None,
    insecure: options.Insecure = False,
    keys: options.Keys = None,
    service: options.Service = None,
    log_format: options.LogFormatOption = None,
    log_level: options.LogLevelOption = None,
) -> None:
    """A page in the browser: a service while it works, its jobs one by one, and evaluations side by side.

    prorl dashboard

    prorl dashboard --runs eval

    It prints its address and runs until Ctrl-C. The address holds a key that only you can read, since others may be on
    this machine; where the folder of --keys lets in bearer tokens (`prorl keys bearer NAME --role operator`), viewers
    need one of these. Over TCP the dashboard's own key is an operator's.
    From elsewhere, `ssh -L 8787:127.0.0.1:8787 HOST` brings it to you; --tls-cert and --tls-key let it listen beyond
    loopback.
    """
    import uvloop

    from ..gateway.server import serve
    from ..gateway.settings import GatewayOptions

    options.log_as("dashboard", log_format, log_level)
    topology = options.topology_at(connect, config)
    keys = keys or (Path(topology.security.keys) if topology.security.keys else None)
    places = ServiceFolder.open(service) if service is not None and connect is None else None
    if places is not None:
        keys = keys or places.keys("operator")
    key_folder = named_folder(keys)
    os.environ.pop(VARIABLE, None)  # as for `prorl gateway`
    folder = run_dir if run_dir is not None else topology.run_dir
    settings = GatewaySettings(
        bind or topology.dashboard.bind or BIND,
        tls_cert or topology.gateway.tls_cert,
        tls_key or topology.gateway.tls_key,
        use_llm_servers=False,
    )
    gateway_options = GatewayOptions(
        front_door=options.front_door_of(connect, config),
        settings=settings,
        run_dir=own_run_dir(folder),
        keys=key_folder,
        insecure=insecure,
        program="dashboard",
        service=places,
        read_only=read_only or topology.dashboard.read_only,
        runs=runs or (Path(topology.dashboard.runs) if topology.dashboard.runs else None),
    )
    uvloop.run(serve(gateway_options))
