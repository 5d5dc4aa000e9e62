"""`ScoreQueue`: the scoring requests of one engine host, and when each begins.

Generations come first. While none is under way, nor was within `QUIET_S`, `AT_ONCE` texts are scored at a time.
Otherwise one is, and after it the next one waits so long that scoring takes at most `SHARE` of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from ...errors import Busy, EngineFailed
from ...system.logs import about_job
from ...wire.messages.engines import Scored
from ..engine import checked_scores
from .frames import add_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from ...data.scores import Scores
    from ...wire.messages.engines import Score
    from ...wire.sockets import Frame
    from ..engine import Engine, ScoringEngine

AT_ONCE = 4
"""Most texts that are scored at a time."""
SHARE = 0.25
"""Most of the time that scoring takes while generations are under way."""
QUIET_S = 1.0
"""Seconds after the last generation for which others are expected: turns of rollouts end together, or call a tool."""
WAITING_LIMIT = 4096
"""Most requests that wait."""
RETRY_S = 2.0
"""After how many seconds a request beyond them may be repeated."""

log = logging.getLogger("prorl.engine")


@dataclass(slots=True, eq=False)
class _Asked:
    request: Score
    token_ids: NDArray[np.int32]
    envelopes: list[Sequence[Frame]]
    """Of the answer (see `add_envelope`)."""
    task: asyncio.Task[Scores | Exception | None] | None = None
    """None: it waits."""


class ScoreQueue:
    """Scores texts on one engine; made and used on its loop.

    Args:
        engine: the host's.
        generating: returns whether a generation is under way.
        using: keeps the adapter of a request loaded; gives its model and version, or None: the engine's own weights.
        answer: sends a reply and its arrays to the client of each envelope.
        fail: refuses a request, by its id, because of an error.
    """

    def __init__(
        self,
        engine: Engine,
        generating: Callable[[], bool],
        using: Callable[[Score], AbstractContextManager[tuple[str, int] | None]],
        answer: Callable[[Sequence[Sequence[Frame]], Scored, Sequence[bytes]], None],
        fail: Callable[[Sequence[Sequence[Frame]], str, Exception], None],
    ) -> None:
        self._engine, self._generating, self._using = engine, generating, using
        self._answer, self._fail = answer, fail
        self._asked: dict[str, _Asked] = {}
        self._waiting: deque[_Asked] = deque()
        self._rest_until = 0.0
        """When the next text may begin beside generations, on the loop's clock."""
        self._quiet_at = 0.0
        """From when on an engine without generations counts as idle."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, envelope: Sequence[Frame], request: Score, token_ids: NDArray[np.int32]) -> None:
        """Score a text, now or later; a repeated request gets the answer of the first.

        Raises:
            EngineFailed: the engine cannot score.
            Busy: too many requests wait.
        """
        if not self._engine.description.scores:
            raise EngineFailed(f"the engine of {self._engine.description.model} cannot score texts", refused=True)
        asked = self._asked.get(request.request_id)
        if asked is not None:
            add_envelope(asked.envelopes, envelope)
            return
        if len(self._waiting) >= WAITING_LIMIT:
            raise Busy(f"{WAITING_LIMIT} texts wait to be scored here, which is the limit", retry_after_s=RETRY_S)
        asked = self._asked[request.request_id] = _Asked(request, token_ids, [envelope])
        self._waiting.append(asked)
        self.begin_next()

    def abort(self, request_id: str) -> None:
        """Stop a request, if there is one of this id; it gets no answer."""
        asked = self._asked.get(request_id)
        if asked is None:
            return
        if asked.task is not None:
            asked.task.cancel()
        else:
            self._waiting.remove(asked)
            del self._asked[request_id]

    def generations_ended(self) -> None:
        """Note that no generation is under way any more; the next ones may come soon."""
        self._quiet_at = asyncio.get_running_loop().time() + QUIET_S
        self.begin_next()

    def begin_next(self) -> None:
        """Begin what may begin now."""
        while self._waiting and self._may_begin():
            asked = self._waiting.popleft()
            with about_job(asked.request.job_id):
                asked.task = asyncio.create_task(self._score(asked))
            asked.task.add_done_callback(partial(self._ended, asked, asyncio.get_running_loop().time()))

    def close(self) -> list[asyncio.Task[Scores | Exception | None]]:
        """Refuse what waits; return the tasks of what runs, which end with their engine."""
        waiting, self._waiting = [*self._waiting], deque()
        for asked in waiting:
            del self._asked[asked.request.request_id]
            stopping = EngineFailed("the engine host is stopping", unreachable=True)
            self._fail(asked.envelopes, asked.request.request_id, stopping)
        if self._timer is not None:
            self._timer.cancel()
        return [asked.task for asked in self._asked.values() if asked.task is not None]

    def _may_begin(self) -> bool:
        loop, running, generating = (
            asyncio.get_running_loop(),
            len(self._asked) - len(self._waiting),
            self._generating(),
        )
        now = loop.time()
        if not generating and now >= self._quiet_at:
            return running < AT_ONCE
        if not running and now >= self._rest_until:
            return True
        times = [*([] if running else [self._rest_until]), *([] if generating else [self._quiet_at])]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(min(times), self.begin_next) if times else None
        return False

    async def _score(self, asked: _Asked) -> Scores | Exception | None:
        request, token_ids, engine = asked.request, asked.token_ids, cast("ScoringEngine", self._engine)
        try:
            with self._using(request) as adapter:
                more = {"adapter": adapter} if adapter else {}
                scores = await engine.score(token_ids, request.top, request.job_id, **more)
            return checked_scores(scores, len(token_ids), request.top, engine.description.vocabulary)
        except asyncio.CancelledError:
            log.debug("scoring %s was aborted", request.request_id)
            return None
        except Exception as error:  # noqa: BLE001 - reported to the client; the host continues
            return error

    def _ended(self, asked: _Asked, began: float, task: asyncio.Task[Scores | Exception | None]) -> None:
        """Answer all who asked for a text's scores, and begin the next text."""
        request_id = asked.request.request_id
        del self._asked[request_id]
        scores = task.result() if not task.cancelled() else None
        if isinstance(scores, Exception):
            self._fail(asked.envelopes, request_id, scores)
        elif scores is not None:
            arrays = [each.tobytes() for each in (scores.logprobs, scores.top_ids, scores.top_logprobs)]
            self._answer(asked.envelopes, Scored(request_id, weight_version=scores.weight_version), arrays)
        now = asyncio.get_running_loop().time()
        self._rest_until = now + (now - began) * (1 / SHARE - 1)
        self.begin_next()
