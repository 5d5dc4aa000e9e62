"""The dashboard of the shared service, and a real Chromium to look at it with."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from needed import lacking

from prorl_zmq import Job, Sampling
from prorl_zmq.evaluation.transcript import Transcript

from ..evaluation.conftest import HOSTILE, write_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page
    from support.services import SharedService

WAIT_S = 30.0
MEGABYTE = 2**20


def problem(text: str = "What is 1 + 0?", **more: Any) -> Job:
    more.setdefault("sampling", Sampling(max_tokens=6))
    return Job(task="math", instance={"problem": text, "ground_truth": "1"}, **more)


@pytest.fixture(scope="session")
def runs(served: SharedService) -> Path:
    """Two runs of `prorl eval` that the dashboard compares, in their folder."""
    write_run(served.runs / "before", problems=3, samples=2, rewards=(1, 1, 0, 0, 1, 0))
    write_run(served.runs / "after", problems=3, samples=2, rewards=(1, 1, 1, 0, 0, 0), said=HOSTILE, tool_says=HOSTILE)
    return served.runs


def make_long(runs: Path, text: str) -> None:
    """Have the first rollout of the run `after` begin with this text."""
    file = min((runs / "after" / "trajectories").glob("*.json"))
    transcript = msgspec.json.decode(file.read_bytes(), type=Transcript)
    first, second, *others = transcript.turns
    turns = (first, msgspec.structs.replace(second, text=text), *others)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(transcript, turns=turns)))


@pytest.fixture(scope="module")  # its driver keeps an event loop running, which asyncio.run() elsewhere would meet
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        lacking("chromium", "there is no chromium: apt-get install chromium")
    try:
        from playwright import sync_api as playwright
    except ImportError:
        lacking("chromium", "nothing drives it: pip install playwright")
    playwright.expect.set_options(timeout=1000 * WAIT_S)
    # An address that is led here, as an attacker's name server would do it.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in a context of its own; what it throws, and what its security policy refuses, fails the test."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(1000 * WAIT_S)
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: dialog.accept())
    yield page
    context.close()
    assert wrong == []


@pytest.fixture
def dashboard(served: SharedService, page: Page) -> Page:
    """The dashboard, opened by its own address."""
    page.goto(served.dashboard)
    page.locator("#state.is-live").wait_for()
    return page
