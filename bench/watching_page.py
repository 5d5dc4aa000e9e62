"""The dashboard in a real Chromium, with 10,000 jobs in its table: time to paint, to filter, and to show a change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from service import BenchService, free_port

from prorl_zmq import Job, RolloutClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

WAIT_MS = 60_000.0
ROWS = ".virtual tbody tr[aria-rowindex]"
WATCH_ROWS = """
(() => {
  const look = () => {
    if (document.querySelector('.virtual tbody tr[aria-rowindex]')) {
      setTimeout(() => { window.firstRows = performance.now(); });  // behind the frame that paints them
    } else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""
FILTER = """
(text) => new Promise((done) => {
  const search = document.getElementById('search');
  const started = performance.now();
  search.value = text;
  search.dispatchEvent(new Event('input'));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - started)));
})
"""


class PageFigures(NamedTuple):
    """Seconds, one for each try."""

    paints: list[float]
    """From the start of the page's loading until the table shows its first rows."""
    filters: list[float]
    """From a letter in the search until the rows that it leaves are drawn."""
    changes: list[float]
    """From the end of a job, as its client hears of it, until the page shows it."""


def lacks() -> str:
    """Say what this machine lacks to look at the page, and what to do about it; empty: nothing."""
    if shutil.which("chromium") is None:
        return "the page needs a browser: apt-get install chromium"
    return "" if find_spec("playwright") is not None else "the page needs playwright: install the extra [test]"


def measure_page(jobs: int, repeats: int) -> PageFigures:
    with BenchService([("init", 64), ("run", 64), ("eval", 64)]) as service:
        with RolloutClient(service.front_door, timeout_s=120) as client:
            client.submit(Job(task="nothing", instance={}) for _ in range(jobs))
            assert sum(1 for _ in client.stream(timeout_s=60)) == jobs
        with _dashboard(service) as address, chromium() as page:
            page.add_init_script(WATCH_ROWS)
            page.goto(address)
            _wait_for_rows(page, jobs)
            page.evaluate("location.hash = '#/jobs'")
            paints = [_first_rows(page) for _ in range(repeats)]
            _wait_for_rows(page, jobs)
            searches = ("nothing", "task:nothing", "longer:1m", "a1", "")
            filters = [page.evaluate(FILTER, text) / 1e3 for _ in range(repeats) for text in searches]
            page.evaluate(FILTER, "")
            changes = [_change(service.front_door, page) for _ in range(repeats)]
    return PageFigures(paints, filters, changes)


def _first_rows(page: Page) -> float:
    page.reload()
    page.locator(ROWS).first.wait_for(timeout=WAIT_MS)
    return float(page.wait_for_function("window.firstRows", timeout=WAIT_MS).json_value()) / 1e3


def _wait_for_rows(page: Page, jobs: int) -> None:
    page.evaluate("location.hash = '#/jobs'")
    page.get_by_text(f"of {jobs:,}").wait_for(timeout=WAIT_MS)


def _change(front_door: str, page: Page) -> float:
    job = Job(task="nothing", instance={})
    with RolloutClient(front_door) as client:
        client.submit(job)
        assert len(client.collect(1, wait_s=10)) == 1
    ended = time.perf_counter()
    page.locator(ROWS, has=page.locator(f"a[href$='{job.job_id}']"), has_text="completed").wait_for(timeout=WAIT_MS)
    return time.perf_counter() - ended


@contextmanager
def _dashboard(service: BenchService) -> Iterator[str]:
    """Run `prorl dashboard`; give its address, with its key."""
    bind = f"127.0.0.1:{free_port()}"
    flags = ("--connect", service.front_door, "--run-dir", str(service.folder), "--bind", bind)
    command = [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "dashboard", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PRORL_KEYS": ""}) as process:
        try:
            assert process.stderr is not None
            (address,) = re.findall(r"open (http\S+)", process.stderr.readline())
            yield address
        finally:
            process.terminate()


@contextmanager
def chromium() -> Iterator[Page]:
    """Open a page in this machine's browser."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser.new_page()
        browser.close()
