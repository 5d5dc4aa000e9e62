"""vLLM in this process: `AsyncLLM` behind the engine protocol, token ids in and out, without HTTP and text.

vLLM computes in processes of its own (`vllm_processes`); this one passes arrays. Each call of `generate` is one request
of vLLM, and cancelling it aborts the request. Only `stop_token_ids`, `stop` and the limits end a turn, not the model's
own end-of-text ids. Weight versions come from vLLM, per token.

New weights are checked against the model's (`checkpoint`); then vLLM pauses, reloads, takes the version and resumes.
Updates run one at a time, in the order of the calls, and a load continues if its caller is cancelled. A trainer that
moves weights itself does so inside vLLM's processes: by vLLM's own transfer (`vllm_transfer`) or by a
`--worker-extension-cls`. If vLLM's processes die, a reload or transfer ends half-way, or an update is cancelled after
its transfer, the engine is lost: all calls raise `EngineFailed` with `fatal=True`. Prompts are text.
"""

from __future__ import annotations

import asyncio
import gc
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ...errors import EngineFailed, ProrlError
from ...wire.messages.chat import ChatSettings
from ..chat.loading import load_chat_format
from ..checkpoint import check_checkpoint, no_cpu_updates, read_in_time
from ..engine import (
    NOTHING_MORE,
    PAUSES,
    EngineDescription,
    Generation,
    Wanted,
    check_prompt,
    check_scored,
    whole_span,
)
from ..kv_figures import KvMeter
from ..records import asked_records
from .root_cause import root_cause
from .vllm_adapters import VllmAdapters, lora_flags
from .vllm_draft import load_draft
from .vllm_kv_events import VllmKvEvents
from .vllm_processes import Interrupted, interruptible, is_cpu_build, set_environment, shut_down, tailed_output
from .vllm_records import VllmRecords
from .vllm_requests import generation_of, sampling_parameters, scores_of, scoring_parameters
from .vllm_start import downloaded_folder, draft_folder, model_folder, start_async_llm
from .vllm_transfer import VllmTransfer, transfer_backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...config import LoraSlots
    from ...data.scores import Scores
    from ...wire.messages.engines import TransferCall, UpdateMode
    from ...wire.messages.jobs import Sampling
    from ..kv_figures import KvFigures

CHECK_S = 60.0
"""Longest reading of a checkpoint's headers: a folder on a network may hang."""
DRAIN_S = 1800.0
"""Longest wait until running generations are paused, or in mode `drain` have ended."""
RELOAD_S = 1800.0
"""Longest reading of new weights."""

BY_TEMPLATE = ChatSettings("transformers")


class VllmEngine:
    """Implements `engine.AdapterEngine`, `DraftEngine`, `KvEngine` and `TransferEngine` with vLLM.

    It is made by `start`, on its loop.
    """

    def __init__(
        self,
        llm: Any,
        model: Path,
        description: EngineDescription,
        weight_version: int,
        lora: LoraSlots | None,
        meter: KvMeter,
        draft: Path | None = None,
        events: VllmKvEvents | None = None,
    ) -> None:
        self._llm = llm
        self._meter, self._events = meter, events
        self._records = VllmRecords.of(llm.vllm_config)
        is_mixture = getattr(llm.vllm_config.model_config, "is_moe", False)
        self._no_updates = no_cpu_updates(description.model) if is_mixture and is_cpu_build() else ""
        """Why it takes no new weights; empty: it takes them."""
        self._model = model
        self._draft_model = draft
        self._description = description
        self._weight_version = weight_version
        self._running: set[str] = set()
        self._requests = 0
        self._adapters = VllmAdapters(llm, model, lora)
        self._transfer = VllmTransfer(llm)
        self._updating = asyncio.Lock()
        self._paused = False
        """Whether an update was begun."""
        self._updates: set[asyncio.Task[float]] = set()
        self._fault = ""
        """Why the engine can never serve again."""
        self._closed = False

    @classmethod
    async def start(
        cls,
        model: str,
        arguments: Sequence[str] = (),
        chat: ChatSettings = BY_TEMPLATE,
        weight_version: int = 0,
        lora: LoraSlots | None = None,
        *,
        kv_events: bool = False,
    ) -> VllmEngine:
        """Start vLLM; return the engine once it can serve: after half a minute, or more for large models.

        Blocks the loop meanwhile, except for SIGTERM and SIGINT, which end the start.

        Args:
            model: a directory or a hub name.
            arguments: vLLM's own flags.
            chat: how conversations become tokens.
            weight_version: of the weights that it starts with.
            lora: the adapters that it takes; None: none.
            kv_events: whether it publishes the events of its prefix cache.

        Raises:
            ConfigError: the folder lacks a model, tokenizer or chat template, a flag is wrong, or vLLM is missing.
            EngineFailed: vLLM could not start, or was interrupted.
        """
        folder = model_folder(model)
        name = model if folder is None else str(folder)
        set_environment(offline=folder is not None)
        described = chat if chat.tokenizer else msgspec.structs.replace(chat, tokenizer=name)
        # A model that cannot hold a conversation should fail before it is loaded.
        if Path(described.tokenizer).is_dir():  # noqa: ASYNC240 - the loop is blocked for much longer below
            load_chat_format(described)
        meter, events = KvMeter(), VllmKvEvents() if kv_events else None
        with tailed_output() as tail:
            try:
                with interruptible():
                    llm = start_async_llm(name, [*lora_flags(lora, folder), *arguments], meter, events)
                    kept, draft = folder or downloaded_folder(llm.vllm_config.model_config), draft_folder(llm)
            except ProrlError:
                raise
            except Interrupted:
                raise EngineFailed("stopped by a signal before vLLM had started") from None
            except Exception as error:
                cause = root_cause(f"{tail.text()}\n{''.join(traceback.format_exception(error))}")
                raise EngineFailed(f"vLLM could not start with {name}: {cause or repr(error)}") from error
        description = replace(_description(llm.vllm_config, name, chat, lora), drafts=draft is not None)
        if lora is not None and folder is None and is_cpu_build():  # see `lora_flags`
            description = replace(description, scores=False)
        if events is not None:
            description = replace(description, kv_events=events.source(llm.vllm_config))
        engine = cls(llm, kept, description, weight_version, lora, meter, draft, events)
        try:
            await llm.update_weight_version(str(weight_version))
            await engine._adapters.load_neutral()
            await llm.get_supported_tasks()  # kept: so the first request, too, reaches vLLM at once, and can be aborted
        except BaseException:
            await engine.close()
            raise
        finally:
            del llm, events  # something in vLLM keeps this frame; see `close`
        return engine

    @property
    def description(self) -> EngineDescription:
        return self._description

    @property
    def weight_version(self) -> int:
        return self._weight_version

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        job_id: str,
        wanted: Wanted = NOTHING_MORE,
    ) -> Generation:
        self._check_open()
        self._check_prompt(token_ids, stop_token_ids)
        asked = asked_records(wanted, len(token_ids), sampling, self._description)
        adapter = self._adapters.request(wanted.adapter)
        room = self._description.context_tokens - len(token_ids)
        parameters = sampling_parameters(sampling, stop_token_ids, room, self._records.parameters(asked, wanted))
        final = await self._output(token_ids, parameters, job_id, adapter)
        done = generation_of(final, self._records.arrays(final.outputs[0], asked, wanted, len(token_ids)))
        if wanted.adapter is None:
            return done
        return replace(done, spans=whole_span(len(done.token_ids), wanted.adapter[1]))

    async def score(
        self, token_ids: NDArray[np.int32], top: int, job_id: str, adapter: tuple[str, int] | None = None
    ) -> Scores:
        parameters, lora = scoring_parameters(top), self._adapters.request(adapter)
        while True:
            self._check_open()
            check_scored(token_ids, top, self._description)
            version, output = self._weight_version, await self._output(token_ids, parameters, job_id, lora)
            # Otherwise new weights came meanwhile; vLLM begins the next request with them.
            if output.outputs[0].finish_reason != "abort" and version == self._weight_version:
                scored = version if adapter is None else adapter[1]
                return replace(scores_of(output.prompt_logprobs, token_ids, top), weight_version=scored)

    async def _output(self, token_ids: NDArray[np.int32], parameters: Any, job_id: str, adapter: Any) -> Any:
        """Return vLLM's answer to one request."""
        prompt = {"type": "token", "prompt_token_ids": token_ids.tolist()}
        self._requests += 1
        request_id = f"{job_id}-{self._requests}"
        self._running.add(request_id)
        try:
            async for output in self._llm.generate(prompt, parameters, request_id, lora_request=adapter):
                final = output  # the only one
        except Exception as error:  # noqa: BLE001 - vLLM's exceptions are reported to the job
            self._translate(error)
        finally:
            self._running.discard(request_id)
        self._check_open()  # otherwise it was aborted because of that
        return final

    def kv_figures(self, now: float) -> KvFigures | None:
        return self._meter.take(now)

    async def load_adapter(self, model: str, version: int, path: Path) -> None:
        self._check_open()
        with self._translated():
            await self._adapters.load((model, version), path)

    async def remove_adapter(self, model: str, version: int) -> None:
        self._check_open()
        with self._translated():
            await self._adapters.remove((model, version))

    async def begin_update(self, mode: UpdateMode) -> None:
        async with self._updating:
            self._check_updatable()
            with self._translated():
                await self._pause(mode)

    async def end_update(self, weight_version: int | None) -> None:
        async with self._updating:
            self._check_open()
            await self._check_weights(weight_version)
            with self._translated():
                if weight_version is not None:
                    await self._llm.update_weight_version(str(weight_version))
                    self._weight_version = weight_version
                    self._transfer.changed = False
                await self._resume()

    async def update_weights(
        self, path: Path, weight_version: int, mode: UpdateMode, draft: Path | None = None
    ) -> float:
        """Serve the weights in the folder `path` from the next token on; see `DraftEngine.update_weights`.

        Raises:
            InvalidWeights: they cannot be used; nothing has changed.
            EngineFailed: the model is a mixture on vLLM's CPU build (`refused=True`); or vLLM failed during the update,
                and is lost (`fatal=True`).
        """
        update = asyncio.create_task(self._update(path, weight_version, mode, draft), name="update weights")
        self._updates.add(update)
        update.add_done_callback(self._updated)
        return await asyncio.shield(update)

    async def transfer(self, call: TransferCall, info: dict[str, Any], limit_s: float) -> None:
        async with self._updating:
            self._check_updatable()
            with self._translated():
                try:
                    async with asyncio.timeout(limit_s) as limit:
                        await self._transfer.call(call, info)
                except TimeoutError:
                    if limit.expired():  # vLLM's processes wait in the call, and cannot be called again
                        self._lost(f"the trainer's group did not do `{call}` within {limit_s:g} s")
                    raise

    async def set_weight_version(self, weight_version: int) -> None:
        self._check_open()
        await self._llm.update_weight_version(str(weight_version))
        self._weight_version = weight_version

    async def check_health(self) -> None:
        """Raise `EngineFailed` if vLLM has ended or failed."""
        self._check_open()
        if self._llm.errored:
            self._lost("vLLM's engine process has ended; its log says why")

    async def close(self) -> None:
        """Abort running generations (`EngineFailed`), and end vLLM's processes. May be called again."""
        if self._closed:
            return
        self._closed = True
        with suppress(Exception):  # vLLM may have ended already
            await self._llm.abort(list(self._running))
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would log our ending the processes as their failure
        await asyncio.to_thread(shut_down, self._llm)
        self._llm = self._events = None
        self._transfer.close()
        self._adapters.close()
        gc.collect()  # it is in cycles, and fails noisily if collected at the interpreter's exit
        for update in self._updates:
            update.cancel()

    # Updates ----------------------------------------------------------------------------------------------------------

    async def _update(self, path: Path, weight_version: int, mode: UpdateMode, draft: Path | None) -> float:
        async with self._updating:
            try:
                self._check_updatable()
                await self._check_weights(None)
                await read_in_time(CHECK_S, check_checkpoint, path, self._model)
                if draft is not None:
                    assert self._draft_model is not None, "the description has `drafts`"
                    await read_in_time(CHECK_S, check_checkpoint, draft, self._draft_model)
                self._check_open()
                began = time.monotonic()
                with self._translated():
                    await self._pause(mode)
                    await self._load(path, weight_version, draft)
            finally:
                with self._translated():
                    await self._resume()
            return time.monotonic() - began

    async def _pause(self, mode: UpdateMode) -> None:
        """Stop between two tokens; vLLM then has dropped its results computed with the old weights."""
        if self._paused:
            return
        self._paused = True
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._llm.pause_generation(mode=PAUSES[mode], clear_cache=True)
        except BaseException as error:
            await self._resume()
            if isinstance(error, TimeoutError):
                raise EngineFailed(
                    f"what runs did not end within {DRAIN_S:g} s; the weights are still the old ones"
                ) from None
            raise

    async def _load(self, path: Path, weight_version: int, draft: Path | None) -> None:
        try:
            async with asyncio.timeout(RELOAD_S):
                await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
                if draft is not None:
                    await load_draft(self._llm, draft)
                await self._llm.update_weight_version(str(weight_version))
        except BaseException as error:
            # No caller may get a token from a mixture of old and new weights.
            self._fault = f"vLLM failed in taking the weights in {path}: {type(error).__name__}: {error}"
            await self._llm.abort(list(self._running))
            raise
        self._weight_version = weight_version

    async def _resume(self) -> None:
        if self._paused and not self._closed:
            await self._llm.resume_generation()
            self._paused = False

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Convert vLLM's exceptions to this package's."""
        try:
            yield
        except ProrlError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM passes on any exception of its workers
            self._translate(error)

    def _updated(self, update: asyncio.Task[float]) -> None:
        self._updates.discard(update)
        if not update.cancelled():
            update.exception()  # waiting callers receive it

    # Checks -----------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._fault:
            raise EngineFailed(self._fault, fatal=True, unreachable=True)
        if self._closed:
            raise EngineFailed("the engine was closed", unreachable=True)

    async def _check_weights(self, weight_version: int | None) -> None:
        if fault := self._transfer.fault(weight_version):
            self._fault = fault
            await self._llm.abort(list(self._running))
            self._check_open()

    def _check_updatable(self) -> None:
        self._check_open()
        if self._no_updates:
            raise EngineFailed(self._no_updates, refused=True)

    def _check_prompt(self, token_ids: NDArray[np.int32], stop_token_ids: Sequence[int]) -> None:
        check_prompt(token_ids, self._description)
        vocabulary = self._description.vocabulary
        if any(not 0 <= token < vocabulary for token in stop_token_ids):
            raise EngineFailed(
                f"a stop token id is outside of 0 to {vocabulary - 1}: {list(stop_token_ids)}", refused=True
            )

    def _translate(self, error: Exception) -> NoReturn:
        """Raise vLLM's error as one of this package."""
        self._check_open()
        if self._llm.errored:
            self._lost("vLLM's engine process has ended; its log says why")
        cause = error.__cause__ or error
        refused = isinstance(cause, ValueError)  # some are vLLM's validation errors
        raise EngineFailed(f"vLLM refused or failed: {type(cause).__name__}: {cause}", refused=refused) from error

    def _lost(self, why: str) -> NoReturn:
        self._fault = self._fault or why
        raise EngineFailed(why, fatal=True, unreachable=True)


def _description(config: Any, model: str, chat: ChatSettings, lora: LoraSlots | None) -> EngineDescription:
    records = VllmRecords.of(config)
    return EngineDescription(
        model=model,
        chat=chat if chat.tokenizer else msgspec.structs.replace(chat, tokenizer=model),
        context_tokens=config.model_config.max_model_len,
        vocabulary=config.model_config.get_vocab_size(),
        max_in_flight=config.scheduler_config.max_num_seqs,
        logprobs_mode=config.model_config.logprobs_mode,
        scores=True,
        records=records.names,
        top_limit=records.top_limit,
        unrecorded=records.unrecorded,
        adapter_slots=0 if lora is None else lora.slots,
        kv=True,
        transfer=transfer_backend(config),
        transfer_ranks=config.parallel_config.world_size_across_dp,
    )
