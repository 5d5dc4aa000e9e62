"""What `prorl dashboard` does not start with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.commands import complaint, prorl
from support.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bind", "8787"), "HOST:PORT"),
        (("--bind", "0.0.0.0:PORT"), "--tls-cert"),
        (("--keys", "nowhere"), "key folder"),
    ],
)
def test_what_it_does_not_start_with(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    words = (flag.replace("PORT", str(free_port())) for flag in flags)
    environment = {**os.environ, "PRORL_RUN_DIR": str(tmp_path / "run")}
    assert said in complaint(prorl("dashboard", *words, cwd=tmp_path, environment=environment))
