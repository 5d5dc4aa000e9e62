from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from chat_families import FAMILIES, save_tokenizer

from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.chat import loading as chat_loading
from prorl_zmq.inference.chat.loading import chat_format, load_chat_format, same_vocabulary
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prorl_zmq.inference.chat import ChatFormat

pytestmark = pytest.mark.xdist_group("transformers")


def test_a_format_is_loaded_once() -> None:
    assert load_chat_format(ChatSettings()) is load_chat_format(ChatSettings())
    assert load_chat_format(ChatSettings()).stop_token_ids


def test_a_transformers_format_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="needs the tokenizer's directory") as caught:
        load_chat_format(ChatSettings(kind="transformers"))
    assert caught.value.key == "chat.tokenizer"


def test_who_needs_no_chat_format_loads_none() -> None:
    code = (
        "import sys, prorl_zmq.brokers.backends.backend_broker, prorl_zmq.inference.chat.loading\n"
        "wanted = ('prorl_zmq.inference.chat.embedded_chat', 'transformers', 'jinja2')\n"
        "sys.exit(any(name in sys.modules for name in wanted))"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatSettings]:
    """A tokenizer whose files cannot be read until the test is over, as on a network's file system."""
    settings = ChatSettings(kind="transformers", tokenizer="/hanging")
    over = threading.Event()
    load = chat_loading._load

    def hang(asked: ChatSettings) -> ChatFormat:
        if asked == settings:
            over.wait(60)
        return load(asked)

    monkeypatch.setattr(chat_loading, "_load", hang)
    yield settings
    over.set()


def test_a_tokenizer_that_hangs_holds_up_only_who_needs_it(
    hanging: ChatSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(chat_loading, "LOADING_LIMIT_S", 0.5)
        threads = threading.active_count()
        jobs = [asyncio.create_task(chat_format(hanging)) for _ in range(50)]
        cancelled = asyncio.create_task(chat_format(hanging))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await chat_format(ChatSettings()) is load_chat_format(ChatSettings())
        assert not any(job.done() for job in jobs)
        failures = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(failure, ConfigError) and hanging.tokenizer in failure.message for failure in failures)
        with pytest.raises(ConfigError, match="did not load in"):  # at once: it is not tried again
            await chat_format(hanging)
        assert threading.active_count() <= threads + 1

    asyncio.run(main())


def test_a_failure_answers_for_a_while_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        settings = ChatSettings(kind="transformers", tokenizer=str(tmp_path))
        with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
            await chat_format(settings)
        save_tokenizer(FAMILIES["chatml"], tmp_path)
        with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
            await chat_format(settings)
        until, failure = chat_loading._FAILED[settings]
        monkeypatch.setitem(chat_loading._FAILED, settings, (until - chat_loading.FAILURE_KEPT_S, failure))
        assert await chat_format(settings) is load_chat_format(settings)

    asyncio.run(main())


def test_vocabularies_are_compared_by_tokens_and_ids(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    families = (FAMILIES["chatml"], FAMILIES["chatml"], FAMILIES["r1"])
    for family, folder in zip(families, folders, strict=True):
        save_tokenizer(family, folder)
    one, same, other = (ChatSettings("transformers", str(folder)) for folder in folders)
    missing = ChatSettings("transformers", str(tmp_path / "missing"))

    async def compared() -> list[bool]:
        pairs = [(one, one), (one, same), (one, other), (one, ChatSettings()), (ChatSettings(), ChatSettings())]
        found = [await same_vocabulary(*pair) for pair in (*pairs, (missing, missing))]
        with pytest.raises(ConfigError):
            await same_vocabulary(one, missing)
        return found

    assert asyncio.run(compared()) == [True, True, False, False, True, True]
