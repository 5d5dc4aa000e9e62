"""Requests and answers of a grader process: MessagePack with a length prefix, over a socket pair."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
"""In front of each packed message."""
MESSAGE_LIMIT_BYTES = 64 * 2**20
OUTPUT_LIMIT_BYTES = 1 << 20
"""How much a grader may print in one call; beyond it, its writes fail."""


class Call(msgspec.Struct, frozen=True):
    module: str
    name: str
    """Within the module, with dots for what is in a class."""
    arguments: tuple[Any, ...]


class Answer(msgspec.Struct, frozen=True):
    value: Any = None
    problem: str = ""
    """What it raised, or why its result cannot be passed on; empty: `value` is the result."""
    raised: bool = False
    """The function raised the problem."""
