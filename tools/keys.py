"""Keys of a terminal, as a model writes them among the text that it types: `yes<enter>`, `<ctrl-c>`, `<up>`."""

from __future__ import annotations

import re

KEYS = {
    "enter": b"\r",
    "tab": b"\t",
    "esc": b"\x1b",
    "space": b" ",
    "backspace": b"\x7f",
    "delete": b"\x1b[3~",
    "up": b"\x1b[A",
    "down": b"\x1b[B",
    "right": b"\x1b[C",
    "left": b"\x1b[D",
    "home": b"\x1b[H",
    "end": b"\x1b[F",
    "pageup": b"\x1b[5~",
    "pagedown": b"\x1b[6~",
    "lt": b"<",
    **{f"ctrl-{chr(code + 0x60)}": bytes((code,)) for code in range(1, 27)},
    "ctrl-\\": b"\x1c",
    "ctrl-]": b"\x1d",
}
"""What each key sends, by its name in angle brackets; `lt` is a plain `<`."""
_WRITTEN = re.compile("<(" + "|".join(map(re.escape, KEYS)) + ")>", re.IGNORECASE)


def typed(text: str) -> bytes:
    """Return the bytes that a terminal sends for a text with keys in it; other angle brackets stand for themselves."""
    pieces = _WRITTEN.split(text)
    # Every second piece is the name of a key.
    return b"".join(
        KEYS[piece.lower()] if index % 2 else piece.encode("utf-8", "replace") for index, piece in enumerate(pieces)
    )
