"""The backend of one attempt of a job, and the time limit of its phase, which some waits for a backend stop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from ..data.scores import joined_scores
from ..errors import Busy, EngineFailed, InvalidJob
from ..inference.chat.loading import same_vocabulary
from ..inference.engine import Wanted
from ..metrics.catalog import GENERATE_SECONDS
from ..system.traces import span
from ..wire.messages.base import POLICY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..data.scores import Scores
    from ..inference.client import EngineClient
    from ..inference.engine import Generation
    from ..wire.messages.backends import Backend
    from ..wire.messages.chat import ChatSettings
    from ..wire.messages.jobs import Job, Sampling
    from .backend_client import BackendClient

MOVE_LIMIT = 4
"""Most moves of a phase to another backend after a failed generation; then the attempt has failed."""

SHORTEST_PAUSE_S = 0.1
"""Shortest pause before an engine whose queue was full is asked again."""

Answer = TypeVar("Answer")

log = logging.getLogger("prorl.stage")


@dataclass(slots=True)
class PhaseClock:
    """The time limit of a phase, without pauses of this process, waits for backends, and turns that a host parks."""

    limit_s: float
    began: float = field(default_factory=time.monotonic)
    _timer: asyncio.Timeout | None = None
    _stops: int = 0
    """How many waits for a backend stop the clock now."""
    _left_s: float = 0.0
    """Of the limit, when the clock was stopped."""

    def limit(self) -> asyncio.Timeout:
        """Start the limit: an asynchronous context."""
        self._timer = asyncio.timeout(self.limit_s)
        return self._timer

    @property
    def expired(self) -> bool:
        return self._timer is not None and self._timer.expired()

    def add(self, seconds: float) -> None:
        """Extend the limit; without effect once the phase has ended, though its sandbox may still be closing."""
        if self._timer is not None and not self.expired and (until := self._timer.when()) is not None:
            with suppress(RuntimeError):
                self._timer.reschedule(until + seconds)

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], None]]:
        """Yield a function that stops the clock until the block ends; several blocks may stop it at a time."""
        timer, loop, stopped = self._timer, asyncio.get_running_loop(), False
        assert timer is not None, "the phase runs"

        def stop() -> None:
            nonlocal stopped
            if stopped or timer.expired():
                return
            stopped = True
            self._stops += 1
            if (until := timer.when()) is not None:
                self._left_s = until - loop.time()
                timer.reschedule(None)

        try:
            yield stop
        finally:
            if stopped:
                self._stops -= 1
                if not self._stops and not timer.expired():
                    timer.reschedule(loop.time() + self._left_s)


@dataclass(slots=True)
class JobBackend:
    """Generates on a backend of a model, assigned with the first call and replaced when it fails; `release` it."""

    _job: Job
    _attempt: int
    _backends: BackendClient
    _engines: EngineClient
    _clock: PhaseClock
    _moves_left: int = MOVE_LIMIT
    model: str = POLICY
    record: tuple[str, ...] = ()
    """What each generation records (see `Job.record`)."""
    current: Backend | None = None
    room_wait_s: float = 0.0
    """How long the job waited while ready backends of the model had no room for it."""
    _context_tokens: int = 0
    """The longest prompt so far, with its answer."""
    _reported: EngineFailed | None = None
    _moving: asyncio.Lock | None = None
    """Held by the conversation that moves the job to another backend."""

    async def assigned(self) -> Backend:
        """Return the backend, waiting for one as long as the job allows; see `BackendClient.assign`."""
        if self.current is None:
            with self._clock.stopping() as stop, span("assign backend"):
                asked = self._job, self._attempt, stop
                self.current = await self._backends.assign(*asked, model=self.model, on_waited=self._waited)
        return self.current

    def _waited(self, seconds: float) -> None:
        self.room_wait_s += seconds

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        rows_known: int = 0,
        *,
        record: tuple[str, ...] | None = None,
    ) -> Generation:
        """Generate (see `engine.Generator`). After a failure, continue on another backend of the same model, or retry.

        Token ids are all the state that an engine needs, so the attempt continues. `record` replaces the backend's own.
        """
        job = self._job
        asked = self.record if record is None else record
        more: dict[str, Any] = {"wanted": Wanted(asked, rows_known)} if asked else {}

        waited_before_s = math.inf

        async def generate(backend: Backend) -> Generation:
            nonlocal waited_before_s
            waited_before_s = min(waited_before_s, self.room_wait_s)
            moved_s, began = self.room_wait_s - waited_before_s, time.monotonic()
            named = {**more, **self._adapter(backend)}
            age_s = self._backends.age_s(job.job_id, self.model)
            with self._clock.stopping() as stop:
                done = await self._engines.generate(
                    *(backend, job.job_id, token_ids, sampling, stop_token_ids),
                    timeout_s=job.episode.generation_s,
                    age_s=age_s,
                    on_parked=stop,
                    **named,
                )
            GENERATE_SECONDS.observe(time.monotonic() - began, backend.backend_id)
            self._context_tokens = max(self._context_tokens, len(token_ids) + len(done.token_ids))
            return replace(done, room_wait_s=done.room_wait_s + moved_s) if moved_s else done

        return await self._answered(generate)

    def _adapter(self, backend: Backend) -> dict[str, Any]:
        """Return the options with which a backend is asked for an adapter; empty: the model is the backend's own."""
        if backend.name == self.model:
            return {}
        version = self._backends.pinned(self._job.job_id, self._attempt, self.model)
        return {"adapter": self.model, "adapter_version": version}

    async def score(
        self, token_ids: NDArray[np.int32], segments: Sequence[int], top: int, chat: ChatSettings
    ) -> Scores:
        """Score a text, int32 [T]: one forward pass of the engine for each segment, with the same retries.

        Segments that were scored before new weights came are scored a second time.

        Args:
            token_ids: the text.
            segments: where each segment but the first begins.
            top: how many of the likeliest tokens to list for each position.
            chat: of the engine whose token ids the text has.

        Raises:
            InvalidJob: the segments cannot be those of the text; or the model has another vocabulary or too short a
                context, or its engine cannot score.
            EngineFailed, NoBackend: no backend of the model answered.
        """
        edges = [0, *segments, len(token_ids)]
        if any(start >= end for start, end in pairwise(edges)):
            raise InvalidJob(f"segments cannot begin at {list(segments)} in {len(token_ids)} tokens", field="segments")
        backend = await self.assigned()
        if not backend.scores:
            message = f"the model {self.model!r} cannot score texts: backend {backend.backend_id} ({backend.model})"
            raise InvalidJob(f"{message} has an engine without log-probs of a prompt", field="model")
        if not await same_vocabulary(chat, backend.chat):
            raise other_vocabulary(backend, chat)
        longest = max(end - start for start, end in pairwise(edges))
        if backend.context_tokens and longest >= backend.context_tokens:
            raise InvalidJob(
                f"a text of {longest} tokens is too long for the context of {backend.context_tokens} tokens of the "
                f"model {self.model!r}",
                field="token_ids",
            )
        texts = [token_ids[start:end] for start, end in pairwise(edges)]
        scored = [await self._score_segment(text, top) for text in texts]
        newest = max(one.weight_version for one in scored)
        # New weights came between two segments. If they come again meanwhile, the result says the oldest version.
        again = [at for at, one in enumerate(scored) if one.weight_version < newest]
        for at in again:
            scored[at] = await self._score_segment(texts[at], top)
        return joined_scores(scored)

    async def check_tokenizer(self, chat: ChatSettings) -> None:
        """Check that a backend of the service has the tokenizer of a text, before it is loaded: a job may name any.

        Raises:
            InvalidJob: no backend has it.
            NoBackend: the backend broker did not answer.
        """
        if chat.tokenizer in ("", (await self.assigned()).chat.tokenizer):
            return
        if chat.tokenizer not in await self._backends.tokenizers():
            raise InvalidJob(f"no backend of the service has the tokenizer {chat.tokenizer!r:.200}", field="chat")

    async def _score_segment(self, token_ids: NDArray[np.int32], top: int) -> Scores:
        async def score(backend: Backend) -> Scores:
            # Texts may wait at the engine, and before it, for long: the phase's limit counts.
            asked = backend, self._job.job_id, token_ids, top, self._clock.limit_s
            while True:
                try:
                    return await self._engines.score(*asked, **self._adapter(backend))
                except Busy as error:
                    await asyncio.sleep(_pause_s(error))

        try:
            return await self._answered(score)
        except EngineFailed as error:
            if error.fields.get("refused"):
                raise InvalidJob(f"the text cannot be scored: {error.message}", field="token_ids") from error
            raise

    async def _answered(self, ask: Callable[[Backend], Awaitable[Answer]]) -> Answer:
        """Return a backend's answer; after a failure ask another one of the same model, or again."""
        backend, job, give_up = await self.assigned(), self._job, 0.0
        while True:
            try:
                done = await ask(backend)
            except EngineFailed as error:
                if error.fields.get("refused"):
                    raise
                self._moving = self._moving or asyncio.Lock()
                async with self._moving:
                    if self.current is not None and backend is not self.current:
                        backend = self.current  # another conversation of the job has left the one that failed
                        continue
                    self.report(error)
                    give_up = give_up or time.monotonic() + job.backend_wait_s
                    if error.fields.get("unreachable"):
                        last = time.monotonic() > give_up
                    else:
                        self._moves_left -= 1
                        last = self._moves_left < 0
                    if last:
                        raise
                    other, stopped_s = await self._another(backend.backend_id)
                    give_up += stopped_s
                    if not _interchangeable(backend, other):
                        raise
                    log.info("the job continues with backend %s: %s", other.backend_id, error.message)
                    self.current = backend = other
            else:
                if backend is self.current:
                    self._backends.note_served(job.job_id, self._attempt, self.model)
                return done

    async def _another(self, leaving: str) -> tuple[Backend, float]:
        """Return another backend, and the seconds of the wait that do not count."""
        stopped = math.inf

        def on_starting() -> None:
            nonlocal stopped
            stopped = min(stopped, time.monotonic())
            stop()

        with self._clock.stopping() as stop:
            other = await self._backends.assign(
                *(self._job, self._attempt, on_starting),
                leaving=leaving,
                model=self.model,
                on_waited=self._waited,
            )
        return other, max(0.0, time.monotonic() - stopped)

    def report(self, error: EngineFailed) -> None:
        """Report a failed generation to the broker, once; an engine without the adapter has not failed."""
        if self.current is not None and error is not self._reported and not error.fields.get("not_loaded"):
            self._reported = error
            self._backends.report_failure(self._job.job_id, self.current, error.message)

    def release(self) -> None:
        """Release the assignment, or stop waiting for one."""
        self._backends.release(self._job.job_id, self._attempt, self.model, self._context_tokens)


def _pause_s(error: Busy) -> float:
    return max(SHORTEST_PAUSE_S, float(error.fields.get("retry_after_s") or 0.0))


def other_vocabulary(backend: Backend, chat: ChatSettings) -> InvalidJob:
    """Return the error of a backend that cannot score token ids of an engine with this chat format."""
    return InvalidJob(
        f"the model {backend.name!r} ({backend.model}) has another vocabulary than the text, whose tokenizer is "
        f"{chat.tokenizer or chat.kind}: the same ids would mean different tokens",
        field="model",
    )


def _interchangeable(one: Backend, other: Backend) -> bool:
    """Return whether a conversation can move between backends: same policy, tokens, log-probs and context length."""
    fields = ("model", "chat", "logprobs_mode", "context_tokens", "records")
    return all(getattr(one, name) == getattr(other, name) for name in fields)
