"""Finds the frames, and the relevant line, of a thread or task that does not end."""

from __future__ import annotations

import sys
import sysconfig
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from types import FrameType

LIBRARY = sysconfig.get_path("stdlib")


def task_frames(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of a task's coroutines, the innermost last."""
    frames: list[FrameType] = []
    waits: Any = task.get_coro()
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        frames.append(frame)
        waits = waits.cr_await
    return frames


def thread_frames(ident: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost last."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(ident)  # noqa: SLF001 - there is no other way
    while frame is not None:
        frames.insert(0, frame)
        frame = frame.f_back
    return frames


def place_of(frames: list[FrameType]) -> str:
    """Return the file and line of the innermost frame outside of Python's library, if there is one."""
    places = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    others = [place for place in places if not place[0].startswith(LIBRARY) or "site-packages" in place[0]]
    return "{}:{}".format(*(others or places or [("an unknown place", 0)])[-1])
