"""Near misses: what a model may have meant by a text that is not in a file, told from how such texts go wrong.

Two ways are looked for: the line numbers that view shows were copied along, and whitespace differs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .excerpt import SNIPPET_LIMIT, number

if TYPE_CHECKING:
    from .text_file import TextFile

SEARCH_LIMIT_BYTES = 2**20
"""Largest file that is searched for near misses."""
WORD_LIMIT = 2000
"""Most words of a text that is searched for with other whitespace."""
NUMBERED = re.compile(r"^ *\d+\t", re.MULTILINE)


def near_miss(file: TextFile, wanted: str) -> str:
    if file.stamp.size > SEARCH_LIMIT_BYTES:
        return ""
    text = file.encoding.decode(file.read(file.start, SEARCH_LIMIT_BYTES)).replace("\r\n", "\n")
    plain = NUMBERED.sub("", wanted)
    if plain.strip() and plain != wanted and plain in text:
        return " It is there without the line numbers that view puts before each line: leave them out."
    words = wanted.split()
    if not 0 < len(words) <= WORD_LIMIT:
        return ""
    match = re.search(r"\s+".join(map(re.escape, words)), text)
    if match is None:
        return ""
    first = text.count("\n", 0, match.start()) + 1
    last = text.count("\n", 0, match.end()) + 1
    rows = number(text.split("\n")[first - 1 : last], first, SNIPPET_LIMIT)
    return f" This differs from it in whitespace only:\n{rows.text}"
