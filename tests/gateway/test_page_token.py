"""The token of a dashboard without keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import ConfigError, NotAllowed
from prorl_zmq.gateway.page_token import PageToken

if TYPE_CHECKING:
    from pathlib import Path


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    first = PageToken(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert PageToken(file).token == first.token
    assert len(first.token) >= 32
    assert PageToken(tmp_path / "other").token != first.token


def test_only_it_is_let_in(tmp_path: Path) -> None:
    token = PageToken(tmp_path / "token")
    assert token.sender(token.token).role is None
    for wrong in ("", token.token[:-1], token.token + "x", "ä", "\udcff"):
        with pytest.raises(NotAllowed, match="prorl dashboard"):
            token.sender(wrong)


def test_a_file_that_somebody_else_led_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="dashboard's token"):
        PageToken(tmp_path / "token")
