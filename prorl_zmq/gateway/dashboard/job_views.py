"""What a job brought, in words: an ended one (`JobView`), and one that has not ended (`LiveTurns`).

A job's tokens are read by the tokenizer that its backend names. If that cannot be had here, the transcript has token
ids only, and `problem` says why.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from ...errors import ProrlError
from ...evaluation.transcript import TextReader, Transcript, make_transcript
from ...inference.chat.loading import chat_format
from ...wire.messages.jobs import Phase, Result  # noqa: TC001 - msgspec reads annotations at run time
from ...wire.messages.watching import TurnsSoFar  # noqa: TC001
from ..bodies import Body

if TYPE_CHECKING:
    from ...data.trajectory import TokenArrays, Trajectory
    from ...wire.messages.backends import ChatSettings
    from ...wire.messages.watching import TurnsPeeked
    from ..loaded_texts import LoadedTexts

READERS_LIMIT = 16


class JobView(Body, frozen=True):
    """What an ended job brought."""

    result: Result
    transcript: Transcript
    problem: str = ""
    """Why the transcript has no texts, or no tokens."""


class LiveTurns(Body, frozen=True):
    """How far a job has come that has not ended."""

    phase: Phase
    place: Literal["queued", "held"]
    attempt: int
    stage_id: str = ""
    node: str = ""
    so_far: TurnsSoFar | None = None
    """None: its conversation has not begun, or its RUN begins or ends just now."""
    transcript: Transcript | None = None
    """Of the turns that `so_far` shows; None: there are none, or no more than the asker knows."""
    problem: str = ""
    """Why the transcript has no texts."""


class JobViews:
    def __init__(self, texts: LoadedTexts) -> None:
        self._texts = texts
        self._readers: dict[ChatSettings, TextReader] = {}

    async def view(self, result: Result, trajectory: Trajectory | None) -> JobView:
        if trajectory is None or not len(trajectory.token_ids):
            kept = f"Its tokens are on node {result.kept.node} until they are collected." if result.kept else ""
            return JobView(result=result, transcript=Transcript(job_id=result.job_id), problem=kept)
        transcript, problem = await self._read(result.job_id, trajectory, result.backend)
        return JobView(result=result, transcript=transcript, problem=problem)

    async def turns(self, peeked: TurnsPeeked, arrays: TokenArrays | None) -> LiveTurns:
        """Put the last turns of a job into words."""
        transcript, problem, so_far = None, "", peeked.so_far
        if arrays is not None and so_far is not None:
            transcript, problem = await self._read(peeked.job_id, arrays, so_far.backend)
        return LiveTurns(
            phase=peeked.phase,
            place=peeked.place,
            attempt=peeked.attempt,
            stage_id=peeked.stage_id,
            node=peeked.node,
            so_far=so_far,
            transcript=transcript,
            problem=problem,
        )

    async def _read(self, job_id: str, arrays: TokenArrays | Trajectory, backend_id: str) -> tuple[Transcript, str]:
        """Return a transcript, and why it has no texts."""
        problem, reader = "", None
        try:
            reader = await self._reader(backend_id)
        except ProrlError as error:
            problem = f"There are no texts: {error.message}"
        return await asyncio.to_thread(make_transcript, job_id, arrays, reader), problem

    async def _reader(self, backend_id: str) -> TextReader:
        settings = await self._texts.settings_of(backend_id)
        if settings not in self._readers:
            if len(self._readers) == READERS_LIMIT:
                self._readers.clear()
            self._readers[settings] = TextReader(await chat_format(settings), settings)
        return self._readers[settings]
