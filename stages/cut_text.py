"""Cut long texts for people and models: keep the beginning and the end."""

from __future__ import annotations

from typing import TypeGuard

from ..wire.messages.base import NOTE_LIMIT


def cut_text(text: str, limit: int) -> str:
    """Return a text; if it is longer than `limit`, its beginning, its end, and the number of characters left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… ({len(text) - 2 * half} characters left out) …\n{text[-half:]}"


def is_whole(note: str | None) -> TypeGuard[str]:
    """Return whether a note is stored, and stored uncut."""
    return note is not None and len(note) <= NOTE_LIMIT
