"""Whether a note of a stored result is what the grader wrote, and not its beginning and end (see `cut_text`)."""

from __future__ import annotations

from typing import TypeGuard

from ..wire.messages.base import NOTE_LIMIT


def is_whole(note: str | None) -> TypeGuard[str]:
    return note is not None and len(note) <= NOTE_LIMIT
