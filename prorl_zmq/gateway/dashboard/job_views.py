"""`JobView`: what an ended job brought, in words: its result, and its transcript as `prorl view` has it.

A job's tokens are read by the tokenizer that its backend names. If that cannot be had here, the transcript has token
ids only, and `problem` says why.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ...errors import ProrlError
from ...evaluation.transcript import TextReader, Transcript, make_transcript
from ...inference.chat_loading import chat_format
from ...wire.messages.jobs import Result  # noqa: TC001 - msgspec reads annotations at run time
from ..bodies import Body

if TYPE_CHECKING:
    from ...data.trajectory import Trajectory
    from ...wire.messages.backends import ChatSettings
    from ..loaded_texts import LoadedTexts

READERS_LIMIT = 16


class JobView(Body, frozen=True):
    """What an ended job brought."""

    result: Result
    transcript: Transcript
    problem: str = ""
    """Why the transcript has no texts, or no tokens."""


class JobViews:
    def __init__(self, texts: LoadedTexts) -> None:
        self._texts = texts
        self._readers: dict[ChatSettings, TextReader] = {}

    async def view(self, result: Result, trajectory: Trajectory | None) -> JobView:
        if trajectory is None or not len(trajectory.token_ids):
            kept = f"Its tokens are on node {result.kept.node} until they are collected." if result.kept else ""
            return JobView(result=result, transcript=Transcript(job_id=result.job_id), problem=kept)
        problem, reader = "", None
        try:
            reader = await self._reader(result.backend)
        except ProrlError as error:
            problem = f"There are no texts: {error.message}"
        transcript = await asyncio.to_thread(make_transcript, result.job_id, trajectory, reader)
        return JobView(result=result, transcript=transcript, problem=problem)

    async def _reader(self, backend_id: str) -> TextReader:
        settings = await self._texts.settings_of(backend_id)
        if settings not in self._readers:
            if len(self._readers) == READERS_LIMIT:
                self._readers.clear()
            self._readers[settings] = TextReader(await chat_format(settings), settings)
        return self._readers[settings]
