"""The text of an ended job (`JobView`) and of a running one (`LiveTurns`).

Tokens are decoded with the tokenizer that the job's backend names. If it cannot be loaded, `problem` says why, and the
transcript has token ids only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from ...errors import ProrlError
from ...evaluation.transcript import Transcript, make_transcript
from ...wire.messages.jobs import Phase, Result  # noqa: TC001 - msgspec reads annotations at run time
from ...wire.messages.watching import TurnsSoFar  # noqa: TC001
from ..bodies import Body

if TYPE_CHECKING:
    from ...data.trajectory import TokenArrays, Trajectory
    from ...wire.messages.watching import TurnsPeeked
    from ..message_texts import LoadedTexts


class JobView(Body, frozen=True):
    """The result and transcript of an ended job."""

    result: Result
    transcript: Transcript
    problem: str = ""
    """Why the transcript has no texts, or no tokens."""


class LiveTurns(Body, frozen=True):
    """The progress of a running job."""

    phase: Phase
    place: Literal["queued", "held"]
    attempt: int
    stage_id: str = ""
    node: str = ""
    so_far: TurnsSoFar | None = None
    """None: its conversation has not begun, or its RUN is starting or ending."""
    transcript: Transcript | None = None
    """Of the turns in `so_far`; None: there are none, or the page knows them."""
    problem: str = ""
    """Why the transcript has no texts."""


class JobViews:
    def __init__(self, texts: LoadedTexts) -> None:
        self._texts = texts

    async def view(self, result: Result, trajectory: Trajectory | None) -> JobView:
        if trajectory is None or not len(trajectory.token_ids):
            kept = f"Its tokens are on node {result.kept.node} until they are collected." if result.kept else ""
            return JobView(result=result, transcript=Transcript(job_id=result.job_id), problem=kept)
        transcript, problem = await self._read(result.job_id, trajectory, result.backend)
        return JobView(result=result, transcript=transcript, problem=problem)

    async def turns(self, peeked: TurnsPeeked, arrays: TokenArrays | None) -> LiveTurns:
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
        """Return a transcript, and the reason if it has no texts."""
        problem, reader = "", None
        try:
            reader = (await self._texts.of(backend_id)).reader
        except ProrlError as error:
            problem = f"There are no texts: {error.message}"
        return await asyncio.to_thread(make_transcript, job_id, arrays, reader), problem
