"""`prorl gateway`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer
from msgspec.structs import replace

from ..config import DashboardSettings, GatewaySettings
from ..service.process_plans import HttpPlan
from ..system.logs import say
from . import options
from .children import run
from .option_groups import ProcessOptions
from .target import Target


def gateway(
    process: ProcessOptions,
    bind: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:8080",
    front_door: Annotated[
        str | None,
        typer.Option(metavar="ENDPOINT", help="The service's front door. [default: that of the run folder]"),
    ] = None,
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    name: Annotated[str, typer.Option(help="This gateway's unique name. [default: made of host and port]")] = "",
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Tokenizer of servers that /add_llm_server names. [default: what the client says]"
        ),
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
    service: options.Service = None,
) -> None:
    """Serve a service over HTTP: a JSON API, the REST API of ProRL Agent, and the dashboard, until SIGTERM.

    Beyond loopback it needs --tls-cert and --tls-key, and --keys with tokens that `prorl keys bearer` made.
    """
    topology = process.topology()
    folder = service if front_door is None else None
    target = Target(connect=front_door or topology.endpoint(topology.rollout_broker.front_door))
    if folder is not None:
        target = Target(service=folder)
    if not metrics_only and (absent := target.absence()):
        say("prorl gateway", f"{absent.message}; requests are answered 503 until it runs", logging.WARNING)
    run(
        HttpPlan(
            name="gateway",
            serves="metrics" if metrics_only else "gateway",
            topology=replace(topology, dashboard=DashboardSettings(runs=str(runs or ""))),
            service=str(folder or ""),
            settings=GatewaySettings(bind, tls_cert, tls_key, not no_llm_servers, tokenizer),
            front_door=front_door or "",
            gateway=name,
            timeout_s=timeout_s,
        )
    )
