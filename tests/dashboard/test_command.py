"""`prorl dashboard` without a service, as the manual has it."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

import pytest
from documents import DASHBOARD_COMMAND
from support.later import Later
from support.ports import free_port
from support.services import started

from ..evaluation.conftest import write_run

if TYPE_CHECKING:
    from pathlib import Path

    from playwright import sync_api as playwright
    from playwright.sync_api import Page
else:
    playwright = Later("playwright.sync_api")

pytestmark = pytest.mark.xdist_group("served")


def test_without_a_service_it_says_so_and_compares_runs(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path / "eval" / "one", problems=2, samples=1, rewards=(1, 0))
    program, *arguments = shlex.split(DASHBOARD_COMMAND)
    environment = {**os.environ, "PRORL_RUN_DIR": str(tmp_path / "run")}
    bind = ("--bind", f"127.0.0.1:{free_port()}")
    with started(program, *arguments, *bind, cwd=tmp_path, environment=environment) as shown:
        (address,) = re.findall(r"open (http\S+)", shown.wait_line("open http"))
        page.goto(address)
        playwright.expect(page.get_by_role("alert")).to_contain_text("is the service running?")
        page.get_by_role("link", name="Runs").click()
        playwright.expect(page.get_by_role("region", name="Problems")).to_contain_text("1 of 1")
        playwright.expect(page.locator(".of-k")).to_contain_text("50.0 %")
        assert shown.end() == 0
