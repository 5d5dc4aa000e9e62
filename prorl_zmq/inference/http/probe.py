"""Finds out what a server speaks and serves, by asking it.

A server that loads a model listens late, so nothing is concluded before one answers, up to a limit. Then each dialect
is tried with a real generation of a few tokens, the exactest first; if none fits, the error has what each was answered.
The same generation tells which distribution the log-probs are of: drawn from the one likeliest token, they are 0 if
they are of what was sampled from, and below 0 if they are of the model's own distribution.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec
import numpy as np

from ...config import ServerApi
from ...errors import ConfigError, EngineFailed
from ...wire.messages.jobs import Sampling
from ..engine import checked
from .completions import Completions
from .dialect import LOADING, UNTOLD, Turn, version_number, with_version
from .prorl import Prorl
from .sglang import Sglang
from .vllm_generate import VllmGenerate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.jobs import LogprobsMode
    from ..engine import Generation
    from .connections import Answer, Connections
    from .dialect import Dialect

START_S = 600.0
"""Default of how long a server may take until it answers."""
INTERVAL_S = 0.5
SAY_S = 10.0
"""How often is said what is waited for."""
ASK_S = 10.0
GENERATE_S = 120.0
"""Longest first generation: servers compile on the way."""

_PROMPT = np.array([1, 2, 3], np.int32)
"""Ids that every vocabulary has; what they mean does not matter."""
_SAMPLING = Sampling(temperature=1.0, top_k=1, max_tokens=4)

_Said = TypeVar("_Said", bound=msgspec.Struct)

log = logging.getLogger("prorl.engine")


@dataclass(frozen=True, slots=True)
class Found:
    """What a probe found out."""

    dialect: Dialect
    model: str
    """The model's directory or name as the server knows it; empty: it did not say."""
    context_tokens: int
    """0: it did not say."""
    weight_version: int
    """`LOADING`: it was left in the middle of taking new weights."""
    logprobs_mode: LogprobsMode
    numbered: bool = False
    """Its answers say this version."""


class _Card(msgspec.Struct):
    id: str = ""
    root: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class _Info(msgspec.Struct):
    """Of SGLang's `/get_model_info` and `/get_server_info`, and vLLM's `/weight_info`."""

    model_path: str = ""
    weight_version: str | int | None = None
    context_length: int | None = None


class _Paused(msgspec.Struct):
    is_paused: bool = False


class Probe:
    """Asks one server.

    Args:
        connections: to it; not closed here.
        initial_version: of the weights that the server was started with.
        start_s: how long it may take until it answers.
    """

    def __init__(self, connections: Connections, *, initial_version: int = 0, start_s: float = START_S) -> None:
        self._connections = connections
        self._initial_version = initial_version
        self._start_s = start_s

    async def find(self, api: ServerApi = "auto", context_tokens: int = 0) -> Found:
        """Find out, or check that the server speaks what `api` names.

        Args:
            api: the dialect.
            context_tokens: most tokens of a prompt and its answer together, for servers that do not say.

        Raises:
            ConfigError: `api` names no dialect.
            EngineFailed: nothing answers in time, or not in a dialect that we know, or the server is paused.
        """
        if api not in get_args(ServerApi):
            raise ConfigError(f"{api!r} is not one of {', '.join(get_args(ServerApi))}", key="api")
        await self._until_up()
        await self._see_that_it_runs()
        card = await self._card()
        context_tokens = card.max_model_len or context_tokens
        dialects: list[Dialect] = [
            VllmGenerate(),
            Sglang(),
            Completions(card.id),
            Prorl(context_tokens),
        ]
        dialect, generation = await self._speaking([d for d in dialects if api in ("auto", d.name)])
        model, said = card.root or card.id, generation.spans[-1].weight_version
        numbered = said >= 0
        if dialect.name in ("sglang", "completions"):
            info = await self._info(dialect)
            model = model if dialect.name == "completions" else info.model_path or model
            context_tokens = context_tokens or info.context_length or 0
            if info.weight_version is not None:
                said = version_number(str(info.weight_version))
        exact = bool(np.all(np.abs(generation.logprobs) < 1e-6))
        other: LogprobsMode = "tempered_logprobs" if dialect.name == "sglang" else "raw_logprobs"
        mode: LogprobsMode = "processed_logprobs" if exact else other
        version = self._initial_version if said == UNTOLD else said
        return Found(dialect, model, context_tokens, version, mode, numbered)

    async def _see_that_it_runs(self) -> None:
        """Have a server go on that was left in the middle of an update; its weights have a word for a name, then."""
        if not _read(await self._ask("/is_paused"), _Paused).is_paused:
            return
        info = _read(await self._ask("/weight_info"), _Info)
        if version_number(str(info.weight_version)) != LOADING:
            raise EngineFailed(
                f"{self._connections.url} is paused: somebody changes its weights, or left it like that; POST /resume "
                "to it, or start it again",
                unreachable=True,
            )
        log.warning("%s was left in the middle of taking weights, and is resumed", self._connections.url)
        await self._connections.control("POST", "/resume", timeout_s=ASK_S)

    async def _until_up(self) -> None:
        """Wait until the server answers anything but that it is not ready, and say so."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline, say = started + self._start_s, started + 2 * INTERVAL_S
        while True:
            try:
                answer = await self._connections.control("GET", "/health", timeout_s=ASK_S)
            except EngineFailed as error:
                if not error.fields.get("unreachable"):
                    raise
                problem = str(error)
            else:
                if answer.status != 503:
                    return
                problem = f"{self._connections.url}/health answers {answer.excerpt()}"
            if loop.time() + INTERVAL_S > deadline:
                raise EngineFailed(f"{problem}; it was given {self._start_s:g} s to start", unreachable=True)
            if loop.time() >= say:
                log.info("waiting for the server, %.0f of %g s: %s", loop.time() - started, self._start_s, problem)
                say = loop.time() + SAY_S
            await asyncio.sleep(INTERVAL_S)  # nothing tells of a server's start

    async def _speaking(self, dialects: Iterable[Dialect]) -> tuple[Dialect, Generation]:
        tried: list[str] = []
        for dialect in dialects:
            try:
                generation = await self._try(dialect)
            except EngineFailed as error:
                tried.append(f"{dialect.name}: POST {dialect.path}: {error}")
                if error.fields.get("silent"):
                    break
            else:
                for problem in tried:
                    log.info("%s does not speak %s", self._connections.url, problem)
                return dialect, generation
        lines = "".join(f"\n  {problem}" for problem in tried)
        url = self._connections.url
        hint = "; its address ends before /v1" if url.endswith("/v1") else ""
        raise EngineFailed(f"{url} answers, but gives no token ids in a way that we know{hint}:{lines}")

    async def _try(self, dialect: Dialect) -> Generation:
        turn = Turn(_PROMPT, _SAMPLING, ())
        try:
            async with asyncio.timeout(GENERATE_S):
                answer = await self._connections.generate(
                    dialect.path, dialect.request(turn), limit_bytes=turn.answer_limit_bytes
                )
        except TimeoutError:
            raise EngineFailed(f"no answer within {GENERATE_S:g} s", silent=True) from None
        if answer.status != 200:
            raise EngineFailed(answer.excerpt() + _hint(dialect, answer))
        generation = dialect.generation(answer.body, turn)
        checked(replace(generation, spans=with_version(generation.spans, 0)), _SAMPLING.max_tokens)
        if not generation.spans:
            raise EngineFailed(f"the server aborted: {answer.excerpt()}")
        return generation

    async def _card(self) -> _Card:
        """Ask for the model; of a server with adapters, the first is the base model."""
        answer = await self._ask("/v1/models")
        cards = _read(answer, _Cards).data
        return cards[0] if cards else _Card()

    async def _info(self, dialect: Dialect) -> _Info:
        if dialect.name == "completions":
            return _read(await self._ask("/weight_info"), _Info)
        answer = await self._ask("/get_model_info")
        info = _read(answer if answer and answer.status == 200 else await self._ask("/model_info"), _Info)
        answer = await self._ask("/get_server_info")
        more = _read(answer if answer and answer.status == 200 else await self._ask("/server_info"), _Info)
        return msgspec.structs.replace(info, context_length=more.context_length)

    async def _ask(self, path: str) -> Answer | None:
        """Ask for what a server may have not."""
        try:
            return await self._connections.control("GET", path, timeout_s=ASK_S)
        except EngineFailed:
            return None


def vocabulary_of(*directories: str) -> int:
    """Return the size of a model's vocabulary from the first config.json that can be read; 0: none can."""
    for directory in directories:
        try:
            config = json.loads((Path(directory) / "config.json").read_bytes()) if directory else {}
            size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(size, int) and size > 0:
            return size
    return 0


def _read(answer: Answer | None, kind: type[_Said]) -> _Said:
    """Read what a server says of itself; what is of another form says nothing."""
    if answer is None or answer.status != 200:
        return kind()
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return kind()


def _hint(dialect: Dialect, answer: Answer) -> str:
    if answer.status == 401:
        return " (the server wants its API key)"
    if dialect.name == "vllm" and answer.status in (403, 404, 405):
        return " (vLLM has it with --enable-scale-out)"
    return ""
