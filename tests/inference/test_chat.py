from __future__ import annotations

import subprocess
import sys

import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.chat import CHAT_FORMATS, check_chat_format, load_chat_format


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_every_known_format_can_be_loaded(name: str) -> None:
    assert check_chat_format(name) == name
    assert load_chat_format(name).stop_token_ids


@pytest.mark.parametrize("give", [check_chat_format, load_chat_format])
def test_an_unknown_format_is_refused_by_name(give: object) -> None:
    assert callable(give)
    with pytest.raises(ConfigError, match="'unheard-of'; there is: embedded") as caught:
        give("unheard-of")
    assert caught.value.key == "chat_format"


def test_the_brokers_check_a_format_without_loading_one() -> None:
    code = "import sys, prorl_zmq.brokers.backend_broker; sys.exit('prorl_zmq.inference.embedded_chat' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
