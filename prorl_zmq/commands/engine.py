"""`prorl-engine`."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated

import typer

from ..config import BackendSettings, Topology, own_run_dir
from ..errors import ConfigError
from ..service.service_folder import BACKENDS, WAIT_S, ServiceFolder
from ..system.logs import keep_secret
from ..system.node_name import default_node
from ..system.run_places import default_run_dir
from ..wire.messages.backends import History
from ..wire.messages.base import new_id
from ..wire.sockets import endpoint_beside
from . import options


def engine(
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="KIND",
            help="What to host: `embedded`, the small policy of the package; `vllm` or `transformers`, in this "
            "process; `http`, a server that runs already; or a kind that another package offers.",
        ),
    ] = "embedded",
    model: options.Model = "",
    arguments: options.VllmFlags = None,
    url: Annotated[str, typer.Option(help="http: such as http://gpu-7:8000; its key is in $PRORL_API_KEY.")] = "",
    api: options.Api = "auto",
    tokenizer: options.Tokenizer = "",
    tool_calls: options.ToolCalls = "",
    history: Annotated[
        History, typer.Option(help="Where the template changes earlier turns: follow it, in a new segment, or append.")
    ] = "template",
    parser_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="A server of vllm launch render: its parsers read what the policy says to a harness. [default: ours]",
        ),
    ] = "",
    template_argument: options.TemplateArguments = None,
    gpus: Annotated[str, typer.Option(metavar="IDS", help="vllm: GPU ids, such as 0,1. [default: all]")] = "",
    cores: Annotated[str, typer.Option(metavar="IDS", help="CPU cores, such as 0,1. [default: all]")] = "",
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="The backend broker, ipc://PATH or tcp://HOST:PORT. [default: in the run folder]",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The backend's id. [default: a new one]")] = "",
    node: Annotated[
        str,
        typer.Option(
            help="This node's name; jobs that run on it are preferred. [default: of the host and its allocation or run "
            "folder]"
        ),
    ] = "",
    weight: Annotated[float, typer.Option(min=1e-6, help="How many jobs it takes beside others.")] = 1.0,
    max_in_flight: Annotated[
        int, typer.Option(min=0, help="Jobs at once beyond which it counts as full; 0: what the engine says.")
    ] = 0,
    context_tokens: Annotated[
        int, typer.Option(min=0, help="http: most tokens of prompt and answer together, if the server does not say.")
    ] = 0,
    option: options.EngineOptions = None,
    weight_version: Annotated[int, typer.Option(min=0, help="The version of the weights that it starts with.")] = 0,
    bind: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where stage processes reach this host, such as tcp://10.0.0.5:*. [default: ipc, or loopback TCP]",
        ),
    ] = "",
    run_dir: options.RunDir = None,
    insecure: options.Insecure = False,
    keys: options.Keys = None,
    service: options.Service = None,
    log_format: options.LogFormatOption = None,
    log_level: options.LogLevelOption = None,
) -> None:
    """An engine host: answers token ids with token ids until SIGTERM.

    prorl-engine --engine vllm --model Qwen/Qwen3-8B --gpus 0,1 -- --tensor-parallel-size 2

    prorl-engine --engine http --url http://gpu-7:8000
    """
    from ..inference.hosting.builtin_kinds import API_KEY
    from ..inference.hosting.host import HostOptions, run_engine_host

    (kind,) = BackendSettings(
        kind=engine,
        model=model,
        urls=(url,) if url else (),
        api=api,
        arguments=tuple(arguments or ()),
        tokenizer=tokenizer,
        tool_calls=tool_calls,
        history=history,
        template_arguments=options.named_values("--template-argument", template_argument),
        parser_url=parser_url,
        context_tokens=context_tokens,
        options=options.named_values("--option", option),
    ).check(flags=True)
    folder = own_run_dir(run_dir if run_dir is not None else default_run_dir())
    backend_id = name or f"engine-{new_id()[:12]}"
    options.log_as(backend_id, log_format, log_level)
    keep_secret(os.environ.get(API_KEY))
    places = ServiceFolder.open(service) if service is not None and connect is None else None
    if places is not None:
        places.wait_for((BACKENDS,), WAIT_S)
        broker, keys = places.backend_broker(), keys or places.keys("node")
    else:
        broker = connect if connect is not None else f"ipc://{folder}/{_BACKEND_BROKER}"
    host_options = HostOptions(
        endpoint=bind or endpoint_beside(broker, f"{folder}/{backend_id}"),
        backend_broker=broker,
        find_backend_broker=places.backend_broker if places is not None else None,
        backend_id=backend_id,
        node=node or default_node(folder),
        weight=weight,
        max_in_flight=max_in_flight,
        insecure=insecure,
        keys=keys,
        run_dir=folder,
    )
    if cores:
        _use_cores(_ids("--cores", cores))
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, _ids("--gpus", gpus)))
    run_engine_host(partial(kind.start, weight_version), host_options)


_BACKEND_BROKER = Topology().backend_broker.endpoint.rpartition("/")[2]


def _use_cores(cores: list[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        there = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"--cores: this process may use cores {there}, not {cores}", key="cores") from error


def _ids(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{flag} takes numbers with commas between them, such as 0,1; not {text!r}", key=flag
        ) from None
