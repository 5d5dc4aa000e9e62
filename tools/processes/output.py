"""Output of any length in bounded memory: its head and its tail, with a note where bytes were left out."""

from __future__ import annotations

import codecs

OUTPUT_LIMIT_BYTES = 64 * 1024
"""Default limit on the output of one command that is kept."""


class HeadTail:
    """Keeps the first and the last half of `limit_bytes` of what is appended to it."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._half = max(limit_bytes // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    @property
    def dropped_bytes(self) -> int:
        return max(self._total - len(self._head) - self._half, 0)

    def append(self, data: bytes) -> None:
        self._total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-self._half :]
        # Cutting at twice the size moves each byte once on average.
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def content(self) -> bytes:
        if not self.dropped_bytes:
            return bytes(self._head + self._tail)
        note = b"\n[... %d bytes left out ...]\n" % self.dropped_bytes
        return bytes(self._head + note + self._tail[-self._half :])

    def clear(self) -> None:
        self._head.clear()
        self._tail.clear()
        self._total = 0

    def take(self, *, more: bool) -> tuple[str, int]:
        """Return everything as text, and how many bytes it leaves out; forget it.

        Invalid UTF-8 is replaced. With `more`, an incomplete character at the end is kept for the next call.
        """
        dropped = self.dropped_bytes
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self.content(), final=not more)
        begun, _ = decoder.getstate()
        self.clear()
        self.append(begun)
        return text, dropped
