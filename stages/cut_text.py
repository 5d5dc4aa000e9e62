"""Cut long texts for people and models: keep the beginning and the end."""

from __future__ import annotations

from typing import TypeGuard

from ..wire.messages.base import NOTE_LIMIT


def cut_text(text: str, limit: int) -> str:
    """Return a text; of one with more characters than `limit`, its beginning and its end, and how many lie between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… ({len(text) - 2 * half} characters left out) …\n{text[-half:]}"


def is_whole(note: str | None) -> TypeGuard[str]:
    """Return whether there is a stored note, and it was not cut."""
    return note is not None and len(note) <= NOTE_LIMIT
