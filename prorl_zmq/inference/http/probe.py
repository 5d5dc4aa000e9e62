"""Find out the dialect of a server and the model that it serves.

`probe` waits until the server answers, up to a limit, since a server listens only once its model is loaded. Then it
tries each dialect with a real generation of a few tokens, the most exact dialect first; if none fits, the error lists
each answer. The same generation shows which distribution the log-probs describe: with the most likely token drawn, they
are 0 for the distribution that was sampled from, and below 0 for the model's own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec
import numpy as np

from ...config import ServerApi
from ...errors import ConfigError, EngineFailed
from ...wire.messages.jobs import Sampling
from ...wire.records import EXPERTS, RECORD_TOP_LIMIT, SAMPLING_MASK, TOP_LOGPROBS, Recorded
from ..checkpoint import no_cpu_updates
from ..engine import checked
from .answers import LOADING, UNTOLD, version_number, with_version
from .dialects import Turn
from .generate_dialects import Prorl, Sglang
from .kv_metrics import ANSWER_LIMIT, DIALECTS
from .record_fields import MixtureShape
from .vllm_dialects import Completions, VllmGenerate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.jobs import LogprobsMode
    from ..engine import Generation
    from .connections import Connections
    from .dialects import Dialect

START_S = 600.0
"""Default limit in seconds until a server answers."""
INTERVAL_S = 0.5
SAY_S = 10.0
"""Seconds between two log lines about a server that does not answer yet."""
ASK_S = 10.0
GENERATE_S = 120.0
"""Longest first generation: servers compile during it."""

_PROMPT = np.array([1, 2, 3], np.int32)
"""Ids in every vocabulary; their meaning does not matter."""
_SAMPLING = Sampling(temperature=1.0, top_k=1, max_tokens=4)

_Said = TypeVar("_Said", bound=msgspec.Struct)

log = logging.getLogger("prorl.engine")


@dataclass(frozen=True, slots=True)
class Found:
    dialect: Dialect
    model: str
    """The model's directory or name as the server reports it; empty: not reported."""
    context_tokens: int
    """0: not reported."""
    weight_version: int
    """`LOADING`: an update was left unfinished."""
    logprobs_mode: LogprobsMode
    numbered: bool = False
    """Whether its answers report this version."""
    records: tuple[str, ...] = ()
    top_limit: int = RECORD_TOP_LIMIT
    """Both as in `EngineDescription`."""
    no_updates: str = ""
    """Why the server takes no new weights; empty: it may take them."""
    kv: bool = False
    """Whether it may report on its KV cache."""


class _Card(msgspec.Struct):
    id: str = ""
    root: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class _Info(msgspec.Struct):
    """Of SGLang's model and server info, and vLLM's `/is_paused` and `/weight_info`."""

    model_path: str = ""
    weight_version: str | int | None = None
    context_length: int | None = None
    is_paused: bool = False
    enable_return_routed_experts: bool = False
    vllm_config: str = ""


async def probe(
    connections: Connections,
    api: ServerApi = "auto",
    *,
    context_tokens: int = 0,
    initial_version: int = 0,
    start_s: float = START_S,
) -> Found:
    """Find out the dialect of a server, or check that it is the one that `api` names.

    Raises:
        ConfigError: `api` is not a dialect.
        EngineFailed: no answer in time, or none in a known dialect, or the server is paused.
    """
    if api not in get_args(ServerApi):
        raise ConfigError(f"{api!r} is not one of {', '.join(get_args(ServerApi))}", key="api")
    await _until_up(connections, start_s)
    await _resume_abandoned(connections)
    cards = (await _said(connections, _Cards, "/v1/models")).data
    card = cards[0] if cards else _Card()  # of a server with adapters, the first is the base model
    model, context_tokens = card.root or card.id, card.max_model_len or context_tokens
    dialects: list[Dialect] = [VllmGenerate(), Sglang(), Completions(card.id), Prorl(context_tokens)]
    dialect, generation, records = await _first_spoken(connections, [d for d in dialects if api in ("auto", d.name)])
    version = generation.spans[-1].weight_version
    numbered, info = version >= 0, _Info()
    if dialect.name == "completions":
        info = await _said(connections, _Info, "/weight_info")
    elif dialect.name == "sglang":
        info = await _said(connections, _Info, "/get_model_info", "/model_info")
        server = await _said(connections, _Info, "/get_server_info", "/server_info")
        model, context_tokens = info.model_path or model, context_tokens or server.context_length or 0
        mixture = MixtureShape.read(model) if server.enable_return_routed_experts else None
        dialect = Sglang(mixture)
        masked = Turn(_PROMPT, _SAMPLING, (), Recorded(mask=True))
        with suppress(EngineFailed):  # older ones do not have it
            generation, _ = await _generation(connections, dialect, masked)
            records += (SAMPLING_MASK,) if "mask_ids" in generation.records else ()
        records += (EXPERTS,) if mixture is not None else ()
    if info.weight_version is not None:
        version = version_number(str(info.weight_version))
    has_limit = dialect.name != "sglang" and TOP_LOGPROBS in records
    top_limit = await _top_limit(connections, dialect) if has_limit else RECORD_TOP_LIMIT
    if not top_limit:
        records = tuple(name for name in records if name != TOP_LOGPROBS)
    exact = bool(np.all(np.abs(generation.logprobs) < 1e-6))
    other: LogprobsMode = "tempered_logprobs" if dialect.name == "sglang" else "raw_logprobs"
    mode: LogprobsMode = "processed_logprobs" if exact else other
    version = initial_version if version == UNTOLD else version
    no_updates = await _no_updates(connections, model) if dialect.name in ("vllm", "completions") else ""
    kv = dialect.name in DIALECTS and await _has_metrics(connections)
    return Found(dialect, model, context_tokens, version, mode, numbered, records, max(1, top_limit), no_updates, kv)


async def _until_up(connections: Connections, start_s: float) -> None:
    """Wait until the server answers anything but "not ready", and log the wait."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    deadline, say = started + start_s, started + 2 * INTERVAL_S
    while True:
        try:
            answer = await connections.control("GET", "/health", timeout_s=ASK_S)
        except EngineFailed as error:
            if not error.fields.get("unreachable"):
                raise
            problem = str(error)
        else:
            if answer.status != 503:
                return
            problem = f"{connections.url}/health answers {answer.excerpt()}"
        if loop.time() + INTERVAL_S > deadline:
            raise EngineFailed(f"{problem}; it was given {start_s:g} s to start", unreachable=True)
        if loop.time() >= say:
            log.info("waiting for the server, %.0f of %g s: %s", loop.time() - started, start_s, problem)
            say = loop.time() + SAY_S
        await asyncio.sleep(INTERVAL_S)  # a server's start makes no event here


async def _resume_abandoned(connections: Connections) -> None:
    """Resume a server that an engine host left during an update; reject one that another program paused."""
    if not (await _said(connections, _Info, "/is_paused")).is_paused:
        return
    info = await _said(connections, _Info, "/weight_info")
    if version_number(str(info.weight_version)) != LOADING:
        raise EngineFailed(
            f"{connections.url} is paused: somebody changes its weights, or left it like that; POST /resume "
            "to it, or start it again",
            unreachable=True,
        )
    log.warning("%s was left in the middle of taking weights, and is resumed", connections.url)
    await connections.control("POST", "/resume", timeout_s=ASK_S)


async def _first_spoken(
    connections: Connections, dialects: Iterable[Dialect]
) -> tuple[Dialect, Generation, tuple[str, ...]]:
    """Return the first dialect in which the server answers, with its answer and the records that it gives."""
    tried: list[str] = []
    for dialect in dialects:
        try:
            generation, records = await _generation(connections, dialect, Turn(_PROMPT, _SAMPLING, ()))
        except EngineFailed as error:
            tried.append(f"{dialect.name}: POST {dialect.path}: {error}")
            if error.fields.get("silent"):
                break
        else:
            for problem in tried:
                log.info("%s does not speak %s", connections.url, problem)
            return dialect, generation, records
    lines = "".join(f"\n  {problem}" for problem in tried)
    hint = "; its address ends before /v1" if connections.url.endswith("/v1") else ""
    raise EngineFailed(f"{connections.url} answers, but gives no token ids in a way that we know{hint}:{lines}")


async def _generation(connections: Connections, dialect: Dialect, turn: Turn) -> tuple[Generation, tuple[str, ...]]:
    limit_bytes = turn.answer_limit_bytes
    try:
        async with asyncio.timeout(GENERATE_S):
            answer = await connections.generate(dialect.path, dialect.request(turn), limit_bytes=limit_bytes)
    except TimeoutError:
        raise EngineFailed(f"no answer within {GENERATE_S:g} s", silent=True) from None
    if answer.status != 200:
        hint = " (the server wants its API key)" if answer.status == 401 else ""
        if dialect.name == "vllm" and answer.status in (403, 404, 405):
            hint = " (vLLM has it with --enable-scale-out)"
        raise EngineFailed(answer.excerpt() + hint)
    generation = dialect.generation(answer.body, turn)
    checked(replace(generation, spans=with_version(generation.spans, 0)), _SAMPLING.max_tokens)
    if not generation.spans:
        raise EngineFailed(f"the server aborted: {answer.excerpt()}")
    return generation, dialect.records(answer.body)


async def _top_limit(connections: Connections, dialect: Dialect) -> int:
    """Return the largest number of `top_logprobs` that the server gives, by requests of one token each."""
    least, most, tried = 0, RECORD_TOP_LIMIT, RECORD_TOP_LIMIT
    while least < most:
        turn = Turn(_PROMPT, msgspec.structs.replace(_SAMPLING, max_tokens=1), (), Recorded(top=tried))
        try:
            await _generation(connections, dialect, turn)
        except EngineFailed:
            most = tried - 1
        else:
            least = tried
        tried = (least + most + 1) // 2
    return least


async def _no_updates(connections: Connections, model: str) -> str:
    """Return why a vLLM server takes no new weights, which it says in its development mode; empty: it may take them."""
    if MixtureShape.read(model) is None:
        return ""
    config = (await _said(connections, _Info, "/server_info")).vllm_config
    return no_cpu_updates(model) if "device_config=cpu" in config else ""


async def _has_metrics(connections: Connections) -> bool:
    """Return whether a server has `/metrics`, and log if not."""
    try:
        answer = await connections.control("GET", "/metrics", timeout_s=ASK_S, limit_bytes=ANSWER_LIMIT)
    except EngineFailed as error:
        problem = error.message
    else:
        if answer.status == 200:
            return True
        problem = answer.excerpt()
    log.warning(
        "%s does not report on its KV cache, so its slots alone limit its rollouts; SGLang does with --enable-metrics: "
        "GET /metrics: %s",
        connections.url,
        problem,
    )
    return False


async def _said(connections: Connections, kind: type[_Said], *paths: str) -> _Said:
    """Return a server's self-description from the first of these paths that it has; it may have none."""
    for path in paths:
        with suppress(EngineFailed, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer = await connections.control("GET", path, timeout_s=ASK_S)
            if answer.status == 200:
                return msgspec.json.decode(answer.body, type=kind)
    return kind()


def vocabulary_of(*directories: str) -> int:
    """Return the size of a model's vocabulary from the first readable config.json; 0: none is readable."""
    for directory in directories:
        try:
            config = json.loads((Path(directory) / "config.json").read_bytes()) if directory else {}
            size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(size, int) and size > 0:
            return size
    return 0
