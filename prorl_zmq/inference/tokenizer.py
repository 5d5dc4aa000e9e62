"""The embedded policy's tokenizer: a fixed vocabulary, in code, so that no file can be missing or differ.

Ids are, in order: special tokens, the 256 bytes, and pieces of text that suit shell tool calls. Text is split greedily
into the longest pieces, and the rest becomes bytes, so every text has ids that decode to it exactly. Special tokens are
made only from their ids: a tool's output that spells `<|im_end|>` cannot end a turn.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
PAD, IM_START, IM_END, TOOL_CALL, TOOL_CALL_END = range(len(SPECIAL_TOKENS))
FIRST_BYTE = len(SPECIAL_TOKENS)
FIRST_PIECE = FIRST_BYTE + 256

ROLE_PIECES = ("system\n", "user\n", "assistant\n", "tool\n")
"""The pieces that follow `<|im_start|>`."""
CALL_PRELUDE = '{"name": "bash", "arguments": {"command": "'
CALL_END = '"}}'
SHELL_PIECES = (
    *("awk", "cat", "cut", "echo", "expr", "grep", "head", "ls", "nl", "paste", "printf", "rev", "sed", "seq", "sort"),
    *("tac", "tail", "tr", "uniq", "wc"),
    *(" -c", " -l", " -n", " -r", " -u", " -n 1", " -n 2", " 3p"),
    *(" < ", " > ", " >> ", " | ", " && ", "; ", " $(", " '", "' "),
    *("{s+=$1}", " END ", "{print s}", "{print $1}", "{print NR}"),
    *(" data.txt", " answer.txt", " result.txt", "data.txt", "answer.txt", "result.txt", ".txt", "bash: "),
    *("[no output]", "[exit code "),
)
_WORDS = (
    *("a", "add", "after", "all", "an", "and", "answer", "any", "are", "as", "at", "bash", "by", "call", "command"),
    *("copy", "count", "data", "directory", "do", "each", "error", "exit", "file", "files", "find", "first", "for"),
    *("from", "get", "give", "in", "into", "is", "it", "its", "largest", "last", "line", "lines", "many", "no", "not"),
    *("number", "numbers", "of", "on", "one", "only", "or", "order", "output", "print", "put", "read", "result"),
    *("save", "says", "shell", "show", "smallest", "sorted", "status", "store", "such", "sum", "take", "task", "text"),
    *("than", "that", "the", "them", "then", "third", "this", "three", "to", "tool", "tools", "two", "up", "use"),
    *("using", "value", "values", "what", "which", "with", "word", "words", "write", "you", "your"),
)
WORD_PIECES = (
    *(f" {word}" for word in _WORDS),
    *(word.capitalize() for word in _WORDS if len(word) > 1),
    *("Done.", "The answer is ", ". ", ".\n", ", ", ": ", "\n\n"),
)
PIECES = (*ROLE_PIECES, CALL_PRELUDE, CALL_END, *SHELL_PIECES, *WORD_PIECES)
VOCABULARY_SIZE = FIRST_PIECE + len(PIECES)

_TOKEN_BYTES = (
    *(token.encode() for token in SPECIAL_TOKENS),
    *(bytes([value]) for value in range(256)),
    *(piece.encode() for piece in PIECES),
)
_PIECE_IDS = {piece: FIRST_PIECE + index for index, piece in enumerate(PIECES)}
# An alternation takes its first match, so the longest piece comes first.
_PIECE_OR_CHARACTER = re.compile("|".join([*map(re.escape, sorted(PIECES, key=len, reverse=True)), "."]), re.DOTALL)


def encode(text: str) -> NDArray[np.int32]:
    """Return the ids of `text`, int32 [N]; special tokens spelled in it are plain text.

    A lone surrogate becomes `?`.
    """
    ids: list[int] = []
    for part in _PIECE_OR_CHARACTER.findall(text):
        piece = _PIECE_IDS.get(part)
        if piece is None:
            ids.extend(FIRST_BYTE + byte for byte in part.encode("utf-8", "replace"))
        else:
            ids.append(piece)
    return np.array(ids, np.int32)


def decode(token_ids: Iterable[int] | NDArray[np.int32]) -> str:
    """Return the text of ids, special tokens included; bytes that are not UTF-8 become U+FFFD.

    Raises:
        ValueError: an id is not in the vocabulary.
    """
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
    if ids and not 0 <= min(ids) <= max(ids) < VOCABULARY_SIZE:
        raise ValueError(f"token ids must be in 0 to {VOCABULARY_SIZE - 1}")
    return b"".join([_TOKEN_BYTES[token_id] for token_id in ids]).decode("utf-8", "replace")
