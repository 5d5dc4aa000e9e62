"""`Encoding`: how a file's bytes are text. Files are searched and changed as bytes; only what is shown is decoded."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .outcome import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Encoding:
    name: str
    codec: codecs.CodecInfo
    """Looked up here: in the sandbox's child there is no library to load it from."""
    bom: bytes = b""
    unit: int = 1
    """Bytes of one code unit: a match at another offset is none."""

    @property
    def newline(self) -> bytes:
        return self.encode("\n")

    def encode(self, text: str) -> bytes:
        """Return text as the file has it.

        Raises:
            Refused: the encoding lacks a character.
        """
        try:
            return self.codec.encode(text)[0]
        except UnicodeEncodeError as error:
            missing = text[error.start]
            raise Refused(f"The file is in {self.name}, which has no {missing!r}; use other characters.") from None

    def decode(self, data: bytes) -> str:
        """Return bytes as text, with U+FFFD for what is none."""
        return self.codec.decode(data, "replace")[0]

    def find(self, data: bytes, pattern: bytes, start: int) -> int:
        """Return where `pattern` is in `data`, which begins with a whole code unit; -1 if it is not there."""
        at = data.find(pattern, start)
        while at % self.unit and at >= 0:
            at = data.find(pattern, at + 1)
        return at

    def newlines(self, data: bytes, start: int, end: int) -> int:
        """Count the line feeds from `start` to `end`, both between two code units."""
        if self.unit == 1:
            return data.count(b"\n", start, end)
        return self.decode(data[start:end]).count("\n")

    def line_starts(self, data: bytes) -> Iterator[int]:
        """Return where lines begin in `data`, besides its start."""
        newline, after = self.newline, 0
        while (at := self.find(data, newline, after)) >= 0:
            after = at + self.unit
            yield after


UTF_8 = Encoding("UTF-8", codecs.lookup("utf-8"))
LATIN_1 = Encoding("Latin-1", codecs.lookup("latin-1"))
WITH_BOM = (
    Encoding("UTF-8", codecs.lookup("utf-8"), codecs.BOM_UTF8),
    Encoding("UTF-16", codecs.lookup("utf-16-le"), codecs.BOM_UTF16_LE, 2),
    Encoding("UTF-16", codecs.lookup("utf-16-be"), codecs.BOM_UTF16_BE, 2),
)


def encoding_of_bom(head: bytes) -> Encoding:
    """Return the encoding that the first bytes of a file name; UTF-8 if they name none."""
    return next((encoding for encoding in WITH_BOM if head.startswith(encoding.bom)), UTF_8)


def is_latin_1(data: bytes, *, at_end: bool) -> bool:
    """Say if a piece of a file without BOM is rather Latin-1 than UTF-8 with some damage.

    It is if more of its bytes that are not ASCII are out of place in UTF-8 than there are characters made of them.
    Unless the piece is `at_end` of the file, the character that it ends with may be cut, which tells nothing.
    """
    if data.isascii():
        return False
    text = codecs.utf_8_decode(data, "surrogateescape", at_end)[0]
    clean = text.encode("utf-8", "ignore").decode()
    characters = len(clean) - len(clean.encode("ascii", "ignore"))
    return len(text) - len(clean) > characters
