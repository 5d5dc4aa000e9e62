from __future__ import annotations

import subprocess
import sys

import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.chat import load_chat_format
from prorl_zmq.messages import ChatSettings


def test_a_format_is_loaded_once() -> None:
    assert load_chat_format(ChatSettings()) is load_chat_format(ChatSettings())
    assert load_chat_format(ChatSettings()).stop_token_ids


def test_a_transformers_format_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="needs the tokenizer's directory") as caught:
        load_chat_format(ChatSettings(kind="transformers"))
    assert caught.value.key == "chat.tokenizer"


def test_who_needs_no_chat_format_loads_none() -> None:
    code = (
        "import sys, prorl_zmq.brokers.backend_broker, prorl_zmq.inference.chat; "
        "sys.exit(any(name in sys.modules for name in ('prorl_zmq.inference.embedded_chat', 'transformers', 'jinja2')))"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
