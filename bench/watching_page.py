"""The dashboard in a real Chromium, with 10,000 jobs in its table: how soon it paints, filters, and shows a change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness import Incomplete, Row
from service import BenchService, free_port

from prorl_zmq import Job, RolloutClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

PAINT_S, FILTER_S, CHANGE_S = 1.0, 0.2, 2.0
"""The targets."""
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


def page_rows(quick: bool) -> list[Row]:
    """Measure the page.

    Raises:
        Incomplete: this machine has no browser, or no driver for it.
    """
    jobs, repeats = (2_000, 3) if quick else (10_000, 10)
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
    return [
        _row(f"{jobs:,} jobs: first paint of the table", max(paints), PAINT_S),
        _row(f"{jobs:,} jobs: a filter is typed until it is drawn", max(filters), FILTER_S),
        _row(f"{jobs:,} jobs: a job has ended until the page shows it", max(changes), CHANGE_S),
    ]


def _row(name: str, seconds: float, target_s: float) -> Row:
    return Row(f"{name}, the worst", seconds, "s", target=f"under {target_s:g} s", holds=seconds < target_s)


def _first_rows(page: Page) -> float:
    page.reload()
    page.locator(ROWS).first.wait_for(timeout=WAIT_MS)
    return float(page.evaluate("window.firstRows")) / 1e3


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
    """Open a page in this machine's browser.

    Raises:
        Incomplete: it has none, or no driver for it.
    """
    program = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise Incomplete("the page needs playwright: install the extra [test]", []) from None
    if program is None:
        raise Incomplete("the page needs a browser: apt-get install chromium", [])
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser.new_page()
        browser.close()
