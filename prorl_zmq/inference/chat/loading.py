"""Chat formats by their settings: each is loaded once per process, and a failure is repeated for some seconds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from threading import Lock
from typing import TYPE_CHECKING, cast

from ...errors import ConfigError
from ...system.threads import run_aside

if TYPE_CHECKING:
    from ...wire.messages.chat import ChatSettings
    from . import ChatFormat
    from .transformers_chat import TransformersChatFormat

log = logging.getLogger("prorl.chat")

LOADED_FORMATS = 16
"""Most chat formats that one process keeps loaded."""
LOADING_LIMIT_S = 120.0
"""Longest loading of a tokenizer, in seconds."""
FAILURE_KEPT_S, HANGING_KEPT_S = 10.0, 600.0
"""Seconds for which a failure to load is repeated to callers before the next try; longer for a tokenizer that hung,
since each try leaves a thread behind."""

_LOCK = Lock()
"""Guards `_LOADED`; never held during loading."""
_LOADED: dict[ChatSettings, ChatFormat] = {}
"""In order of use, the latest last."""
_LOADING: dict[ChatSettings, asyncio.Task[None]] = {}
_FAILED: dict[ChatSettings, tuple[float, Exception]] = {}
"""Until when (monotonic clock, s) a failure is repeated."""


DIGESTS_KEPT = 64
"""Most digests of vocabularies that are remembered."""
_DIGESTS: dict[str, bytes] = {}
"""By tokenizer."""


async def chat_format(settings: ChatSettings) -> ChatFormat:
    """Return the chat format of these settings; concurrent callers share one loading.

    It loads in its own thread, so a tokenizer that hangs, as on a network's file system, delays only its own users.
    Cancelling a call does not cancel the loading.

    Raises:
        ConfigError: as `load_chat_format`; or it did not load in time.
    """
    if (found := _loaded(settings)) is not None:
        return found
    until, failure = _FAILED.get(settings, (0.0, None))
    if failure is None or time.monotonic() >= until:
        _FAILED.pop(settings, None)
        loading = _LOADING.get(settings)
        if loading is None or loading.get_loop() is not asyncio.get_running_loop():
            loading = _LOADING[settings] = asyncio.create_task(_load_aside(settings))
        await asyncio.shield(loading)
        if (found := _loaded(settings)) is not None:
            return found
        _, failure = _FAILED[settings]
    assert failure is not None
    raise failure.with_traceback(None)


async def chat_warning(settings: ChatSettings) -> str:
    """Return a chat format's warning for its users; empty: none, or its tokenizer is not on this machine."""
    if not os.path.isdir(settings.tokenizer):  # noqa: ASYNC240, PTH112 - as fast as any call
        return ""
    try:
        return (await chat_format(settings)).warning
    except ConfigError:
        return ""  # the first job that needs it raises this


async def _load_aside(settings: ChatSettings) -> None:
    """Load a chat format, or record why it cannot be loaded; never raises, since all callers may be gone."""
    try:
        async with asyncio.timeout(LOADING_LIMIT_S):
            await run_aside(load_chat_format, settings)
    except TimeoutError:
        message = f"the tokenizer {settings.tokenizer} did not load in {LOADING_LIMIT_S:g} s: can its files be read?"
        _note(settings, ConfigError(message, key="chat.tokenizer"), HANGING_KEPT_S)
    except Exception as error:  # noqa: BLE001 - raised by `chat_format`
        _note(settings, error, FAILURE_KEPT_S)
    finally:
        if _LOADING.get(settings) is asyncio.current_task():
            del _LOADING[settings]


def _note(settings: ChatSettings, error: Exception, kept_s: float) -> None:
    now = time.monotonic()
    for old in [key for key, (until, _) in _FAILED.items() if until < now]:
        del _FAILED[old]
    _FAILED[settings] = now + kept_s, error


def load_chat_format(settings: ChatSettings) -> ChatFormat:
    """Return the chat format of these settings; loading a tokenizer takes about a second, once per process.

    May be called in any thread; blocks as long as the tokenizer's files do (see `chat_format`).

    Raises:
        ConfigError: tokenizer or chat template is missing, or it cannot hold a conversation with tools.
    """
    if (found := _loaded(settings)) is not None:
        return found
    loaded = _load(settings)
    if loaded.warning:
        log.warning("%s: %s", settings.tokenizer, loaded.warning)
    with _LOCK:
        _LOADED.setdefault(settings, loaded)
        while len(_LOADED) > LOADED_FORMATS:
            del _LOADED[next(iter(_LOADED))]
    return loaded


def _loaded(settings: ChatSettings) -> ChatFormat | None:
    with _LOCK:
        found = _LOADED.pop(settings, None)
        if found is not None:
            _LOADED[settings] = found
        return found


def _load(settings: ChatSettings) -> ChatFormat:
    if settings.kind == "embedded":
        if settings.template_arguments:
            message = "the small policy's chat format has no template, and so takes no template arguments"
            raise ConfigError(message, key="chat.template_arguments")
        from .embedded_chat import EmbeddedChatFormat

        return EmbeddedChatFormat()
    if not settings.tokenizer:
        raise ConfigError("a chat format of kind transformers needs the tokenizer's directory", key="chat.tokenizer")
    from .transformers_chat import TransformersChatFormat

    return TransformersChatFormat.load(settings)


async def same_vocabulary(one: ChatSettings, other: ChatSettings) -> bool:
    """Return whether two chat formats have the same ids for the same tokens, special ones included.

    Raises:
        ConfigError: a tokenizer cannot be loaded here.
    """
    if one.kind != other.kind:
        return False
    if one.kind == "embedded" or one.tokenizer == other.tokenizer:
        return True
    return await _digest(one) == await _digest(other)


async def _digest(settings: ChatSettings) -> bytes:
    if settings.tokenizer not in _DIGESTS:
        loaded = cast("TransformersChatFormat", await chat_format(settings))
        digest = await asyncio.to_thread(_digest_of, loaded.tokenizer.vocabulary())
        while len(_DIGESTS) >= DIGESTS_KEPT:
            del _DIGESTS[next(iter(_DIGESTS))]
        _DIGESTS[settings.tokenizer] = digest
    return _DIGESTS[settings.tokenizer]


def _digest_of(vocabulary: dict[str, int]) -> bytes:
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items()):
        digest.update(f"{token}\0{number}\0".encode("utf-8", "surrogatepass"))
    return digest.digest()
