"""Check whether a stored note is complete, or only its beginning and end (see `cut_text`)."""

from __future__ import annotations

from typing import TypeGuard

from ..wire.messages.base import NOTE_LIMIT


def is_whole(note: str | None) -> TypeGuard[str]:
    return note is not None and len(note) <= NOTE_LIMIT
