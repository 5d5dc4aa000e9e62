"""`prorl gateway`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..config import GatewaySettings, own_run_dir
from ..security.keys import VARIABLE, named_folder
from ..service.service_folder import ServiceFolder
from ..system.run_places import default_run_dir
from . import options


def gateway(
    bind: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:8080",
    front_door: Annotated[
        str | None,
        typer.Option(metavar="ENDPOINT", help="The service's front door. [default: that of the run folder]"),
    ] = None,
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    name: Annotated[
        str, typer.Option(help="Of this gateway; no two may have the same. [default: of host and port]")
    ] = "",
    tokenizer: Annotated[
        str,
        typer.Option(metavar="DIR", help="Of servers that /add_llm_server names. [default: what the client says]"),
    ] = "",
    no_llm_servers: Annotated[
        bool, typer.Option("--no-llm-servers", help="Ignore /add_llm_server: the service has its own backends.")
    ] = False,
    runs: options.Runs = None,
    metrics_only: Annotated[
        bool, typer.Option("--metrics-only", help="Serve nothing but /metrics, of the processes of the run folder.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=3600, help="Seconds that the service may take to answer.")
    ] = 10.0,
    run_dir: options.RunDir = None,
    insecure: options.Insecure = False,
    keys: options.Keys = None,
    service: options.Service = None,
    log_format: options.LogFormatOption = None,
    log_level: options.LogLevelOption = None,
) -> None:
    """HTTP in front of a service: a JSON API, the REST API of ProRL Agent, and the dashboard, until SIGTERM.

    Beyond loopback it wants --tls-cert and --tls-key, and --keys with tokens that `prorl keys bearer` has made.
    """
    import uvloop

    from ..gateway.server import serve
    from ..gateway.settings import GatewayOptions

    options.log_as("metrics" if metrics_only else "gateway", log_format, log_level)
    places = ServiceFolder.open(service) if service is not None and front_door is None else None
    if places is not None:
        keys = keys or places.keys("service")
    key_folder = named_folder(keys)
    os.environ.pop(VARIABLE, None)  # it may hold bearer tokens only, which are no keys for connections of ours
    folder = run_dir if run_dir is not None else default_run_dir()
    gateway_options = GatewayOptions(
        front_door=front_door if front_door is not None else f"ipc://{folder}/front_door",
        service=places,
        settings=GatewaySettings(bind, tls_cert, tls_key, not no_llm_servers, tokenizer),
        run_dir=own_run_dir(folder),
        name=name,
        keys=key_folder,
        insecure=insecure,
        timeout_s=timeout_s,
        runs=runs,
        metrics_only=metrics_only,
    )
    uvloop.run(serve(gateway_options))
