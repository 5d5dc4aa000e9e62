"""Encodes messages as MessagePack frames, and decodes frames into typed, frozen Structs within size limits.

`msgpack` stops at the first container or string over its limit, before it allocates: ten megabytes of empty maps cost
an unlimited decoder 700 MB. `msgspec.convert` then checks names and types, and its error names the field. The class is
looked up by the message's tag (2 µs), since `convert` analyses a union on every call (27 µs for the backend broker's);
the union only serves for the error on an unknown tag.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgpack
import msgspec

from ..errors import MalformedMessage
from .messages.base import FORMS

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER_LIMIT_BYTES = 4 * 2**20
"""Largest header frame. Bulk data does not travel in headers."""
SMALL_BYTES = 1024
"""Frames up to this size are decoded in one step."""
FEW_FRAMES = 16
"""How many of a kind's first frames are decoded in two steps: a one-step decoder of all replies takes 8 ms to build,
too long for a command that reads four of them."""
CONTAINER_LIMIT = 65_536
"""Most elements of one array or map, and most arrays and maps in one frame."""

T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)

# The pattern of `messages.Identifier`; other values are neither answered nor logged.
_IDENTIFIER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")

# Shared: `msgpack.packb` makes a new one per call, each with a buffer of 256 KiB.
_packer = msgpack.Packer(use_bin_type=True)


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct, *, is_plain: bool = False) -> bytes:
    """Pack a message (or any Struct) into one MessagePack frame; raise `MalformedMessage` unless it is plain data.

    Args:
        message: what to pack.
        is_plain: fields of any type are certain to hold plain data (received or checked), which takes a fifth of the
            time. Otherwise a `datetime` is converted to text.
    """
    try:
        if is_plain or not _holds_any(type(message)):
            return _encoder.encode(message)
        content = msgspec.to_builtins(message, builtin_types=(bytes,))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"this {type(message).__name__} cannot be sent: {error}; use plain data only") from error
    return pack(content)


def decode(frame: bytes | memoryview, kind: Any, limit_bytes: int = HEADER_LIMIT_BYTES) -> Any:
    """Unpack one MessagePack frame into `kind`: a Struct class or a union of tagged ones.

    Raises `MalformedMessage`, whose `field` is the path, if it is over a limit, not MessagePack, or not of that type.
    """
    size = len(frame)
    if size <= SMALL_BYTES and size <= limit_bytes:
        message = _decode_small(frame, kind)
        if message is not None:
            return message
    return convert(unpack(frame, limit_bytes), kind)


def _decode_small(frame: bytes | memoryview, kind: Any) -> Any:
    """Decode a small frame in one step and a third of the time; None if it needs both steps.

    Frames that both steps would reject, or read differently, are left to them: `msgspec` accepts keys and extensions
    that are not plain data in fields of any type.
    """
    known = _known(kind)
    decode_one = known.decode or known.made_decoder()
    if decode_one is None:
        return None
    try:
        message: msgspec.Struct = decode_one(frame)
        fields = _any_fields(type(message))
        if fields is None:
            return None
        for field in fields:
            value = getattr(message, field)
            if value and not _is_plain(value):
                return None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return message


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bytes)


def read_back(message: M, kind: type[M], limit_bytes: int = HEADER_LIMIT_BYTES, *, is_plain: bool) -> M:
    """Return a message as its receiver will decode it, or raise `MalformedMessage` as its receiver would.

    `is_plain`: its fields of any type are empty, which takes a third of the time.
    """
    frame = encode(message, is_plain=is_plain)
    if not is_plain:
        read: M = decode(frame, kind, limit_bytes)
        return read
    _check_size(frame, limit_bytes)
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except msgspec.ValidationError as error:
        raise _malformed(error) from error


def pack(value: Any) -> bytes:
    """Pack plain data (None, bool, int, float, str, bytes, list, dict) into MessagePack."""
    try:
        return bytes(_packer.pack(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage(f"this value cannot be sent: {error}; use plain data only") from error


def unpack(frame: bytes | memoryview, limit_bytes: int = HEADER_LIMIT_BYTES) -> Any:
    size = _check_size(frame, limit_bytes)
    # Each container takes a byte, so a frame no longer than the limit needs no count.
    count = _ContainerCount() if size > CONTAINER_LIMIT else None
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=limit_bytes,
            max_bin_len=limit_bytes,
            max_array_len=CONTAINER_LIMIT,
            max_map_len=CONTAINER_LIMIT,
            max_ext_len=0,
            object_hook=count,
            list_hook=count,
        )
    except (ValueError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise MalformedMessage(f"a frame is not valid MessagePack within the limits: {reason}") from error


def convert(value: Any, kind: type[T] | Any) -> T:
    """Convert plain data to `kind`, or raise `MalformedMessage` whose `field` is the path of the first error."""
    try:
        tag = value.get("type") if isinstance(value, dict) else None
        target: Any = _known(kind).tagged.get(tag, kind) if isinstance(tag, str) else kind
        result: T = msgspec.convert(value, target)
    except msgspec.ValidationError as error:
        raise _malformed(error) from error
    return result


def request_id(content: Any) -> str:
    """Return the `request_id` of an unpacked header, which may be malformed otherwise; `unknown` if it is missing."""
    value = content.get("request_id") if isinstance(content, dict) else None
    return value if isinstance(value, str) and _IDENTIFIER.fullmatch(value) else "unknown"


class _ContainerCount:
    """Counts the arrays and maps of a frame for `msgpack`, and raises `ValueError` above the limit."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, container: Any) -> Any:
        self._count += 1
        if self._count > CONTAINER_LIMIT:
            raise ValueError(f"more than {CONTAINER_LIMIT} arrays and maps")
        return container


class _Kind:
    """Cached decoding state of a class or union."""

    __slots__ = ("_few", "decode", "kind", "tagged")

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        members = [one for one in get_args(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        self.tagged = {str(one.__struct_config__.tag): one for one in members}
        """A union's classes by tag."""
        self.decode: Callable[[bytes | memoryview], Any] | None = None
        """Decodes a frame in one step; None: not built yet, or impossible for this kind."""
        self._few = FEW_FRAMES

    def made_decoder(self) -> Callable[[bytes | memoryview], Any] | None:
        """Return the one-step decoder, building it after `FEW_FRAMES` calls; None before."""
        self._few -= 1
        if self._few == 0:
            with suppress(TypeError, NameError):
                self.decode = msgspec.msgpack.Decoder(self.kind).decode
        return self.decode


_KINDS_LIMIT = 256
_kinds: dict[int, _Kind] = {}
"""By the kind's id (the kind is kept alive here): a union hashes all of its members on each call."""


def _known(kind: Any) -> _Kind:
    found = _kinds.get(id(kind))
    if found is None:
        if len(_kinds) >= _KINDS_LIMIT:
            _kinds.clear()
        found = _kinds[id(kind)] = _Kind(kind)
    return found


def _holds_any(kind: type[msgspec.Struct]) -> bool:
    """Return whether a field may hold a value of any type; also true if the annotations cannot be resolved."""
    return _any_fields(kind) != ()


@cache
def _any_fields(kind: type[msgspec.Struct]) -> tuple[str, ...] | None:
    """Return the names of the fields that may hold any value; None if that cannot be determined."""
    try:
        found = msgspec.inspect.type_info(kind)
    except (NameError, TypeError):
        return None
    if not isinstance(found, msgspec.inspect.StructType):
        return None
    fields = [field for field in found.fields if "AnyType(" in repr(field.type)]
    if any("StructType(" in repr(field.type) for field in fields):
        return None  # within another class
    return tuple(field.name for field in fields)


def _check_size(frame: bytes | memoryview, limit_bytes: int) -> int:
    size = len(frame)
    if size > limit_bytes:
        raise MalformedMessage(f"a frame of {size} bytes is over the limit of {limit_bytes}")
    return size


def _malformed(error: msgspec.ValidationError) -> MalformedMessage:
    what, at, place = str(error).partition(" - at `")
    if words := FORMS.get(what.partition(" matching regex ")[2]):
        what = f"Expected {words}"
    where = place.rstrip("`").rpartition("` in `")[2]  # of a wrong key: "key` in `$.instance"
    return MalformedMessage(f"{what}{at}{place}", field=where or _named_field(what) or "$")


def _named_field(what: str) -> str:
    _, _, name = what.partition("field `")
    return name.rstrip("`")
