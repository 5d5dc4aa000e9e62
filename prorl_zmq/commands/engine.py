"""`prorl-engine`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..config import ServerApi, Topology, default_run_dir, own_run_dir
from ..errors import ConfigError
from ..system.logs import keep_secret
from ..wire.messages.backends import ChatSettings, History, ToolCallFormatName
from ..wire.messages.base import new_id
from ..wire.sockets import endpoint_beside
from .options import Insecure, Keys, LogFormatOption, LogLevelOption, RunDir, log_as

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..inference.engine import Engine


def engine(
    engine: Annotated[
        Literal["embedded", "vllm", "http"],
        typer.Option(
            "--engine",
            help="What to host: the small policy of the package, vLLM in this process, or a server that runs already.",
        ),
    ] = "embedded",
    model: Annotated[
        str,
        typer.Option(
            help="embedded: an .npz file [default: the base policy of the package]; vllm: a directory or a hub name."
        ),
    ] = "",
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- VLLM FLAGS]", help="vLLM's own flags, such as -- --max-model-len 32768.", show_default=False
        ),
    ] = None,
    url: Annotated[
        str,
        typer.Option(metavar="URL", help="http: the server, such as http://gpu-7:8000; its key is in $PRORL_API_KEY."),
    ] = "",
    api: Annotated[ServerApi, typer.Option(help="http: what the server speaks; auto asks it.")] = "auto",
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Tokenizer and chat template, as the stage processes see them. [default: the model's]",
            show_default=False,
        ),
    ] = "",
    tool_calls: Annotated[
        ToolCallFormatName,
        typer.Option(help="How the model writes tool calls. [default: as its template does]", show_default=False),
    ] = "",
    history: Annotated[
        History,
        typer.Option(
            help="Where the template changes earlier turns: follow it (in a new segment of the trajectory) or append."
        ),
    ] = "template",
    gpus: Annotated[
        str, typer.Option(metavar="IDS", help="vllm: GPU ids, such as 0,1. [default: all]", show_default=False)
    ] = "",
    cores: Annotated[
        str, typer.Option(metavar="IDS", help="CPU cores, such as 0,1. [default: all]", show_default=False)
    ] = "",
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="The backend broker, ipc://PATH or tcp://HOST:PORT. [default: in the run folder]",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The backend's id. [default: a new one]", show_default=False)] = "",
    node: Annotated[str, typer.Option(help="This node's name; jobs that run on it are preferred.")] = "local",
    weight: Annotated[float, typer.Option(min=1e-6, help="How many jobs it takes beside others.")] = 1.0,
    max_in_flight: Annotated[
        int,
        typer.Option(
            min=0,
            help="Jobs at once beyond which it counts as full. [default: what the engine says]",
            show_default=False,
        ),
    ] = 0,
    context_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="http: most tokens of a prompt and its answer, for servers that do not say.",
            show_default=False,
        ),
    ] = 0,
    weight_version: Annotated[int, typer.Option(min=0, help="The version of the weights that it starts with.")] = 0,
    bind: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where stage processes reach this host, such as tcp://10.0.0.5:*. [default: ipc, or loopback TCP]",
        ),
    ] = "",
    run_dir: RunDir = None,
    insecure: Insecure = False,
    keys: Keys = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """An engine host: answers token ids with token ids until SIGTERM.

    prorl-engine --engine vllm --model Qwen/Qwen3-8B --gpus 0,1 -- --tensor-parallel-size 2

    prorl-engine --engine http --url http://gpu-7:8000
    """
    from ..inference.host import HostOptions, run_engine_host
    from ..inference.policy import one_blas_thread

    folder = own_run_dir(run_dir if run_dir is not None else default_run_dir())
    backend_id = name or f"engine-{new_id()[:12]}"
    log_as(backend_id, log_format, log_level)
    keep_secret(os.environ.get(API_KEY))
    broker = connect if connect is not None else f"ipc://{folder}/{_BACKEND_BROKER}"
    options = HostOptions(
        endpoint=bind or endpoint_beside(broker, f"{folder}/{backend_id}"),
        backend_broker=broker,
        backend_id=backend_id,
        node=node,
        weight=weight,
        max_in_flight=max_in_flight,
        insecure=insecure,
        keys=keys,
    )
    if cores:
        _use_cores(_ids("--cores", cores))
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, _ids("--gpus", gpus)))
    chat = ChatSettings("transformers", tokenizer, tool_calls, history)
    start = _starter(engine, model, arguments or [], url, api, chat, context_tokens, weight_version)
    with one_blas_thread() if engine == "embedded" else nullcontext():
        run_engine_host(start, options)


API_KEY = "PRORL_API_KEY"
"""Environment variable of the key that an HTTP server wants as a bearer token."""
_BACKEND_BROKER = Topology().backend_broker.endpoint.rpartition("/")[2]


def _starter(
    kind: Literal["embedded", "vllm", "http"],
    model: str,
    arguments: list[str],
    url: str,
    api: ServerApi,
    chat: ChatSettings,
    context_tokens: int,
    weight_version: int,
) -> Callable[[], Awaitable[Engine]]:
    """Return what starts the engine."""
    if arguments and kind != "vllm":
        raise ConfigError(f"{' '.join(arguments)}: only --engine vllm takes flags behind --", key="arguments")
    if bool(url) != (kind == "http"):
        raise ConfigError("--engine http needs --url, and only it has one", key="url")
    if kind == "vllm":
        from ..inference.vllm_engine import VllmEngine

        if not model:
            raise ConfigError("--engine vllm needs --model: a directory or a hub name", key="model")
        return partial(VllmEngine.start, model, arguments, chat, weight_version)
    if kind == "http":
        from ..inference.http.http_engine import HttpEngine

        return partial(
            HttpEngine.start,
            url,
            api=api,
            chat=chat,
            context_tokens=context_tokens,
            weight_version=weight_version,
            api_key=os.environ.get(API_KEY),
        )
    from ..inference.embedded_engine import load_embedded_engine

    async def embedded() -> Engine:
        return load_embedded_engine(Path(model) if model else None, weight_version)

    return embedded


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
