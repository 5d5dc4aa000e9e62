"""The engine of an HTTP server: implements `engine.Engine` with requests to one server.

A server that does not report which weights generated which token is updated while it runs none of this engine's
generations: mode `keep` aborts them, and continues them after the update from the ids generated so far.

If the server dies, running generations raise `EngineFailed` with `unreachable=True`, and `check_health` raises until
the server is back. Its failures are never `fatal`: it may be restarted at the same address. A generation has no time
limit, so its caller cancels it. Requests of other clients of the server are not seen here.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np

from ...errors import ConfigError, EngineFailed, InvalidWeights
from ...wire.messages.chat import ChatSettings
from ...wire.messages.engines import VersionSpan
from ...wire.records import EXPERTS, RECORD_NAMES
from ...wire.sockets import is_loopback_host
from ..adapters import check_adapter, takes_none
from ..checkpoint import check_checkpoint, read_in_time, read_tensors
from ..engine import (
    NOTHING_MORE,
    EngineDescription,
    Generation,
    Wanted,
    check_prompt,
    check_scored,
    checked,
    whole_span,
)
from ..records import asked_records, check_records, joined_records
from .connections import CONNECTIONS, RETRY_S, Connections
from .dialects import Text, Turn, rest_of
from .known_weights import KnownWeights
from .kv_metrics import DIALECTS, VLLM, KvProbe
from .pause import ServerPause
from .probe import START_S, probe, vocabulary_of
from .server_adapters import ServerAdapters
from .weight_updates import SglangUpdates, VllmUpdates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...config import LoraSlots, ServerApi
    from ...data.scores import Scores
    from ...wire.messages.engines import UpdateMode
    from ...wire.messages.jobs import Sampling
    from ..kv_figures import KvFigures
    from .connections import Answer
    from .dialects import ScoringDialect
    from .probe import Found
    from .weight_updates import WeightUpdates

MAX_IN_FLIGHT = 256
HEALTH_S = 4.0
"""Longest health check of the server, in seconds; the host's own limit is longer."""
CHECK_S = 120.0
"""Longest reading of a checkpoint's headers: a folder on a network may hang."""
REST_S = 10.0
"""How long a server may read an adapter's folder after unloading the adapter, for requests that it has not aborted
yet."""
CLOSE_S = 5.0
UPDATES: Final[dict[str, type[WeightUpdates]]] = {
    "vllm": VllmUpdates,
    "completions": VllmUpdates,
    "sglang": SglangUpdates,
}
"""By dialect; only their trainer can update servers of other dialects."""
VLLM_DIALECTS = ("vllm", "completions")
"""Those of servers that take adapters, and that may report on their KV cache."""
REQUEST_IS_WRONG = frozenset({400, 413, 422})
"""Statuses that blame the request; any other failure is the server's."""


class HttpEngine:
    """Implements `engine.AdapterEngine` and `KvEngine` with an HTTP server. Made by `start`, on a running loop."""

    def __init__(
        self, connections: Connections, found: Found, description: EngineDescription, lora: LoraSlots | None = None
    ) -> None:
        self._connections = connections
        self._dialect = found.dialect
        self._model = found.model
        self._description = description
        calls = UPDATES.get(found.dialect.name)
        self._updates = calls(connections) if calls is not None else None
        self._no_updates = found.no_updates
        self._weights = KnownWeights(connections.url, found.weight_version, numbered=found.numbered)
        self._pause = ServerPause(tells_spans=found.dialect.tells_spans)
        self._lora = lora
        self._adapters = ServerAdapters(connections)
        self._kv = KvProbe(connections, DIALECTS.get(found.dialect.name, VLLM))
        self._updating = asyncio.Lock()
        self._updates_begun = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._health: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def start(
        cls,
        url: str,
        *,
        api: ServerApi = "auto",
        chat: ChatSettings | None = None,
        weight_version: int = 0,
        context_tokens: int = 0,
        max_in_flight: int = MAX_IN_FLIGHT,
        connections: int = CONNECTIONS,
        api_key: str | None = None,
        start_s: float = START_S,
        retry_s: float = RETRY_S,
        lora: LoraSlots | None = None,
    ) -> HttpEngine:
        """Wait until the server is up, find out its dialect and its model, and return the engine.

        Raises:
            ConfigError: the address or `api` is invalid, or the tokenizer is unknown; or `lora` is given, the adapters
                that the server takes, and it is no vLLM.
            EngineFailed: no answer in time, or none in a known dialect.
        """
        pool = Connections(url, limit=connections, api_key=api_key, retry_s=retry_s)
        try:
            found = await probe(
                pool, api, context_tokens=context_tokens, initial_version=weight_version, start_s=start_s
            )
            if lora is not None and found.dialect.name not in VLLM_DIALECTS:
                raise ConfigError(
                    f"{url} speaks {found.dialect.name}; adapters need {' or '.join(VLLM_DIALECTS)}", key="lora"
                )
            chat = chat or ChatSettings("transformers")
            if chat.kind == "transformers" and not chat.tokenizer:
                if not found.model:
                    raise ConfigError(f"{url} does not say which model it serves; name its tokenizer", key="tokenizer")
                chat = msgspec.structs.replace(chat, tokenizer=found.model)
            description = EngineDescription(
                model=found.model or url,
                chat=chat,
                context_tokens=found.context_tokens,
                vocabulary=await asyncio.to_thread(vocabulary_of, found.model, chat.tokenizer),
                max_in_flight=max_in_flight,
                logprobs_mode=found.logprobs_mode,
                scores=found.dialect.scores,
                records=found.records,
                adapter_slots=0 if lora is None else lora.slots,
                adapter_rest_s=REST_S,
                reads_here=is_loopback_host(urlsplit(url).hostname or ""),
                kv=found.kv,
                top_limit=found.top_limit,
                unrecorded={
                    name: f"the answers of its server (api {found.dialect.name}) have none"
                    for name in RECORD_NAMES
                    if name not in found.records
                },
            )
        except BaseException:
            await pool.close()
            raise
        return cls(pool, found, description, lora)

    @property
    def description(self) -> EngineDescription:
        return self._description

    @property
    def weight_version(self) -> int:
        """The version of the server's weights, as last reported by the server or `set_weight_version`."""
        return self._weights.weight_version

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        job_id: str,  # noqa: ARG002 - servers log under their own names
        wanted: Wanted = NOTHING_MORE,
    ) -> Generation:
        name = "" if wanted.adapter is None else self._adapters.name(wanted.adapter)
        check_prompt(token_ids, self._description)
        asked, rows = asked_records(wanted, len(token_ids), sampling, self._description), wanted.rows_known
        if self._description.context_tokens:
            room = self._description.context_tokens - len(token_ids)
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        parts: list[Generation] = []
        prompt, left = token_ids, sampling
        while True:
            turn = Turn(prompt, left, stop_token_ids, asked, rows, name)
            part, continues = await self._pause.passing(partial(self._ask, turn, wanted))
            parts.append(part)
            rows += len(part.records.get(EXPERTS, ()))
            if not continues or len(part.token_ids) == left.max_tokens:
                return _joined(parts)
            if len(part.token_ids):
                prompt = np.concatenate([prompt, part.token_ids])
                left = rest_of(left, len(part.token_ids))

    async def score(
        self,
        token_ids: NDArray[np.int32],
        top: int,
        job_id: str,  # noqa: ARG002 - servers log under their own names
        adapter: tuple[str, int] | None = None,
    ) -> Scores:
        name = "" if adapter is None else self._adapters.name(adapter)
        check_scored(token_ids, top, self._description)
        dialect, text = cast("ScoringDialect", self._dialect), Text(token_ids, top, name)
        while True:
            scores = await self._pause.pass_one(partial(self._ask_scores, dialect, text, adapter))
            if scores is not None:
                return scores

    def kv_figures(self, now: float) -> KvFigures | None:  # noqa: ARG002 - they are of the time of their answer
        return self._kv.take()

    async def load_adapter(self, model: str, version: int, path: Path) -> None:
        """Have the server load an adapter, whose folder it sees at the same path; see `AdapterEngine.load_adapter`."""
        self._check_not_closed()
        if self._lora is None:
            raise takes_none()
        base = _folder_here(Path(self._model))
        await read_in_time(CHECK_S, check_adapter, path, base, self._lora.rank)
        await self._adapters.load((model, version), path)

    async def remove_adapter(self, model: str, version: int) -> None:
        self._check_not_closed()
        await self._adapters.remove((model, version))

    async def begin_update(self, mode: UpdateMode) -> None:
        async with self._updating:
            self._check_updatable()
            self._updates_begun += 1
            await self._pause.begin(await self._usable_calls(), mode)

    async def end_update(self, weight_version: int | None) -> None:
        async with self._updating:
            self._check_not_closed()
            await self._go_on(weight_version)

    async def update_weights(self, path: Path, weight_version: int, mode: UpdateMode) -> float:
        """Serve the weights in the folder `path` from the next token on; see `Engine.update_weights`.

        The folder must be at the same path for the server and for this process. The update continues if the caller is
        cancelled, so a server is never left with half an update.

        Raises:
            InvalidWeights: they cannot be used; nothing has changed.
            EngineFailed: the server does not support new weights, or failed during the update; after a failure while it
                reads them, all generations fail until an update succeeds.
        """
        path = path.absolute()  # noqa: ASYNC240 - no file is touched
        update = asyncio.create_task(self._update(path, weight_version, mode), name="update weights")
        self._tasks.add(update)
        update.add_done_callback(self._ended)
        await self._until(update)
        return float(update.result())

    async def set_weight_version(self, weight_version: int) -> None:
        """Set the version of the server's weights from the next token on, after they were changed by other means.

        The number that the server reports takes precedence, so it is set there too if the server supports that.
        """
        self._check_not_closed()
        self._weights.changed(weight_version, numbered=False)
        if self._updates is not None:
            with suppress(EngineFailed):
                await self._updates.set_version(weight_version)
                self._weights.changed(weight_version, numbered=self._dialect.tells_spans)

    async def check_health(self) -> None:
        """Check the server's health; raise `EngineFailed` if it is unhealthy, or does not answer soon."""
        self._check_open()
        if self._health is None:
            self._health = asyncio.create_task(self._ask_health(), name="check health")
            self._tasks.add(self._health)
            self._health.add_done_callback(self._ended)
        await self._until(self._health)

    async def close(self) -> None:
        """Close all connections: running calls raise `EngineFailed`. May be called again."""
        self._closed = True
        self._pause.remove()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await self._connections.close()

    # Generations ------------------------------------------------------------------------------------------------------

    async def _ask(self, turn: Turn, wanted: Wanted) -> Generation:
        self._check_open()
        asked = self._weights.asked()
        updates, updating = self._updates_begun, self._updating.locked()
        answer = await self._answer(turn)
        if answer.status == 404 and wanted.adapter is not None:  # the server was started again
            await self._adapters.restore(wanted.adapter)
            answer = await self._answer(turn)
        self._check_open()  # the weights may have been lost meanwhile
        if answer.status != 200:
            wrong = answer.status in REQUEST_IS_WRONG
            raise EngineFailed(f"{self._connections.url} refused or failed: {answer.excerpt()}", refused=wrong)
        generation = self._weights.read(asked, self._dialect.generation(answer.body, turn))
        unasked = generation.finish_reason == "abort" and not (updating or updates != self._updates_begun)
        if unasked and not len(generation.token_ids):  # with generated tokens, the trainer may have requested the abort
            raise EngineFailed(f"{self._connections.url} aborted a generation without being asked: {answer.excerpt()}")
        vocabulary, ids = self._description.vocabulary, generation.token_ids
        if wanted.adapter is not None:
            generation = replace(generation, spans=whole_span(len(ids), wanted.adapter[1]))
        checked(generation, turn.sampling.max_tokens, vocabulary)
        positions = len(turn.token_ids) + len(ids) - 1 - turn.rows_known
        check_records(generation.records, wanted.record, ids, positions=positions, vocabulary=vocabulary)
        return generation

    async def _ask_scores(self, dialect: ScoringDialect, text: Text, adapter: tuple[str, int] | None) -> Scores | None:
        """Return a text's scores; None: new weights came meanwhile."""
        self._check_open()
        updates, version = self._updates_begun, self._weights.weight_version
        body, limit_bytes = dialect.scoring(text), text.answer_limit_bytes
        answer = await self._connections.generate(dialect.path, body, limit_bytes=limit_bytes)
        if answer.status == 404 and adapter is not None:  # the server was started again
            await self._adapters.restore(adapter)
            answer = await self._connections.generate(dialect.path, body, limit_bytes=limit_bytes)
        self._check_open()
        if (updates, version) != (self._updates_begun, self._weights.weight_version):
            return None
        if answer.status != 200:
            wrong = answer.status in REQUEST_IS_WRONG
            raise EngineFailed(f"{self._connections.url} refused or failed: {answer.excerpt()}", refused=wrong)
        scores = await asyncio.to_thread(dialect.scores_of, answer.body, text)
        return replace(scores, weight_version=version if adapter is None else adapter[1])

    async def _answer(self, turn: Turn) -> Answer:
        return await self._connections.generate(
            self._dialect.path, self._dialect.request(turn), limit_bytes=turn.answer_limit_bytes
        )

    def _check_not_closed(self) -> None:
        if self._closed:
            raise EngineFailed("the engine was closed", unreachable=True)

    def _check_updatable(self) -> None:
        self._check_not_closed()
        if self._no_updates:
            raise EngineFailed(self._no_updates, refused=True)

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._weights.fault:
            raise EngineFailed(self._weights.fault, unreachable=True)

    # Weights ----------------------------------------------------------------------------------------------------------

    async def _usable_calls(self) -> WeightUpdates | None:
        """Return the server's calls for new weights; None: it has none."""
        if self._updates is not None:
            try:
                await self._updates.check()
            except EngineFailed as error:
                if error.fields.get("missing"):
                    return None
                raise
        return self._updates

    async def _update(self, path: Path, weight_version: int, mode: UpdateMode) -> float:
        async with self._updating:
            self._updates_begun += 1
            updates = self._updates
            try:
                self._check_updatable()
                if updates is None:
                    raise EngineFailed(
                        f"{self._connections.url} takes no new weights by HTTP: the trainer must update it, "
                        "between client.begin_weights and end_weights"
                    )
                # Before the server reads them, since it may not survive wrong weights.
                await read_in_time(CHECK_S, _check_weights, path, Path(self._model))
                await updates.check()
            except BaseException:
                if self._pause.begun:
                    with suppress(EngineFailed):
                        await self._go_on(None)
                raise
            began = time.monotonic()
            await self._pause.begin(updates, mode)
            await self._load(updates, path, weight_version)
            return time.monotonic() - began

    async def _load(self, updates: WeightUpdates, path: Path, weight_version: int) -> None:
        ended = True
        try:
            try:
                await updates.load(path, weight_version)
            except InvalidWeights:
                raise
            except BaseException as error:
                # No client may get tokens from a mixture of old and new weights.
                self._weights.half_taken()
                ended = isinstance(error, EngineFailed) and not error.fields.get("unreachable")
                raise
            self._weights.changed(weight_version, numbered=self._dialect.tells_spans)
        except BaseException:
            if not ended:
                self._pause.calls = None  # it may still be loading: it must not be resumed
            with suppress(EngineFailed):
                await self._pause.end()
            raise
        await self._pause.end()

    async def _go_on(self, weight_version: int | None) -> None:
        """End a pause; the server's weights are of this version, or unchanged (None)."""
        calls, known = self._pause.calls, self._weights
        if weight_version is not None:
            known.changed(weight_version, numbered=False)
        version = known.weight_version
        if calls is not None and not known.fault:
            await calls.set_version(version)
            if self._dialect.tells_spans:
                known.changed(version, numbered=True)
        await self._pause.end()

    # Health -----------------------------------------------------------------------------------------------------------

    async def _ask_health(self) -> None:
        try:
            answer = await self._connections.control("GET", "/health", timeout_s=HEALTH_S)
        except EngineFailed:
            self._weights.down()
            raise
        if answer.status >= 500 or answer.status == 429:
            if answer.status != 429:
                self._weights.down()
            raise EngineFailed(f"{self._connections.url} is not well: {answer.excerpt()}", unreachable=True)
        self._weights.up()
        self._check_open()
        if self._description.kv:
            await self._kv.ask()

    async def _until(self, task: asyncio.Task[Any]) -> None:
        """Wait for a task that continues if the caller is cancelled."""
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `close`, not by the caller
                self._check_open()
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task is self._health:
            self._health = None
        if not task.cancelled():
            task.exception()  # waiting callers receive it


def _joined(parts: Sequence[Generation]) -> Generation:
    """Return the parts of one turn joined, with the last one's finish reason."""
    if len(parts) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    start = 0
    for part in parts:
        spans += [VersionSpan(span.weight_version, start + span.start, start + span.end) for span in part.spans]
        start += len(part.token_ids)
    return Generation(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        tuple(spans),
        parts[-1].finish_reason,
        parts[0].cached_tokens,
        joined_records(parts),
    )


def _check_weights(path: Path, model: Path) -> None:
    """Check weights against the server's model, or only by themselves if the model is not a folder on this machine."""
    folder = _folder_here(model)
    if folder is not None:
        check_checkpoint(path, folder)
    else:
        read_tensors(path)


def _folder_here(model: Path) -> Path | None:
    """Return a model's folder if this machine has it; a relative one may be a name on a hub."""
    return model if model.is_absolute() and model.is_dir() else None
