"""`prorl dashboard` alone: without a service, with errors, and as the manual has it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from documents import DASHBOARD_COMMAND
from playwright.sync_api import expect

from ..evaluation.conftest import write_run
from ..gateway.conftest import PRORL, free_port

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("dashboard")


def test_without_a_service_it_says_so_and_compares_runs(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path / "eval" / "one", problems=2, samples=1, rewards=(1, 0))
    command = [*PRORL, *shlex.split(DASHBOARD_COMMAND)[1:], "--bind", f"127.0.0.1:{free_port()}"]
    environment = {**os.environ, "PRORL_RUN_DIR": str(tmp_path / "run")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            (address,) = re.findall(r"open (http\S+)", process.stderr.readline())
            page.goto(address)
            expect(page.get_by_role("alert")).to_contain_text("is the service running?")
            page.get_by_role("link", name="Runs").click()
            expect(page.get_by_role("region", name="Problems")).to_contain_text("1 of 1")
            expect(page.locator(".of-k")).to_contain_text("50.0 %")
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bind", "8787"), "HOST:PORT"),
        (("--bind", "0.0.0.0:PORT"), "--tls-cert"),
        (("--keys", "nowhere"), "key folder"),
    ],
)
def test_what_it_does_not_start_with(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    command = [*PRORL, "dashboard", *(flag.replace("PORT", str(free_port())) for flag in flags)]
    environment = {**os.environ, "PRORL_RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
