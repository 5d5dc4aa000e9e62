"""`TraceLog`: stores the traces of a run's jobs in a file next to its results, for `prorl explain`.

One JSON value per line: the start of each sitting of the run, the trace of each ended job, and periodically the
service's slots. Traces are requested from the rollout broker as results come, `AT_A_TIME` at once. Traces that it does
not return in time, or that a full disk cannot take, are omitted; nothing else depends on the file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Self

import msgspec

from ..errors import ProrlError
from ..wire.messages.front_door import JobTrace, ServiceStatus

if TYPE_CHECKING:
    from io import BufferedWriter
    from pathlib import Path

    from .asynchronous.client import AsyncRolloutClient

TRACES = "traces.jsonl"
AT_A_TIME = 32
ASK_S = 5.0
END_S = 5.0
"""How long the end waits for the last traces."""
STATUS_S = 10.0
"""Interval in seconds at which the service's slots are recorded."""
log = logging.getLogger("prorl.client")


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file; one field is set."""

    began: float = 0.0
    """When a sitting of the run began (start or continuation), in seconds since 1970."""
    status: ServiceStatus | None = None
    trace: JobTrace | None = None


class TraceLog:
    """Writes while its context is open; does nothing without a folder."""

    def __init__(self, client: AsyncRolloutClient, folder: Path | None) -> None:
        self._client = client
        self._path = folder / TRACES if folder is not None else None
        self._wanted: deque[str] = deque()
        self._more = asyncio.Event()
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    def note(self, job_id: str) -> None:
        """Record that a job has ended."""
        if self._task is not None and not self._task.done():
            self._wanted.append(job_id)
            self._more.set()

    async def __aenter__(self) -> Self:
        if self._path is not None:
            self._task = asyncio.create_task(self._write(self._path), name="traces")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is None:
            return
        self._ending = True
        self._more.set()
        try:
            await asyncio.wait({self._task}, timeout=END_S)
        finally:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _write(self, path: Path) -> None:
        try:
            with path.open("ab") as file:
                _append(file, TraceLine(began=time.time()))
                await self._follow(file)
        except OSError as error:
            log.warning("%s: %s; `prorl explain` will know less of this run", path, error.strerror)

    async def _follow(self, file: BufferedWriter) -> None:
        asked_at = 0.0
        while self._wanted or not self._ending:
            if not self._wanted:
                self._more.clear()
                await self._more.wait()
                continue
            if time.monotonic() >= asked_at + STATUS_S:
                asked_at = time.monotonic()
                await self._ask_status(file)
            job_ids = [self._wanted.popleft() for _ in range(min(AT_A_TIME, len(self._wanted)))]
            asking = (self._client.trace(job_id, timeout_s=ASK_S) for job_id in job_ids)
            for trace in await asyncio.gather(*asking, return_exceptions=True):
                if isinstance(trace, JobTrace):
                    _append(file, TraceLine(trace=trace))
                elif not isinstance(trace, ProrlError):
                    raise trace

    async def _ask_status(self, file: BufferedWriter) -> None:
        try:
            status = await self._client.status(timeout_s=ASK_S)
        except ProrlError:
            return
        _append(file, TraceLine(status=msgspec.structs.replace(status, outcomes={}, batches=(), tasks=())))


def _append(file: BufferedWriter, line: TraceLine) -> None:
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()
