"""A real service, its dashboard, and a real Chromium to look at it with."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from command_lines import words_of
from needed import lacking

from prorl_zmq import Job, RolloutClient, Sampling
from prorl_zmq.evaluation.transcript import Transcript

from ..evaluation.conftest import HOSTILE, write_run
from ..gateway.conftest import PRORL, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

WAIT_S = 30.0
MEGABYTE = 2**20


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
        time.sleep(0.02)


def problem(text: str = "What is 1 + 0?", **more: Any) -> Job:
    more.setdefault("sampling", Sampling(max_tokens=6))
    return Job(task="math", instance={"problem": text, "ground_truth": "1"}, **more)


class Service:
    """`prorl serve` with a gateway, which asks for no keys, and a dashboard, which has a key of its own."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.front_door = f"ipc://{self.run_dir}/front_door"
        self.runs = folder / "runs"
        write_run(self.runs / "before", problems=3, samples=2, rewards=(1, 1, 0, 0, 1, 0))
        write_run(
            self.runs / "after", problems=3, samples=2, rewards=(1, 1, 1, 0, 0, 0), said=HOSTILE, tool_says=HOSTILE
        )
        gateway, dashboard = free_port(), free_port()
        self.gateway = f"http://127.0.0.1:{gateway}/dashboard/"
        topology = folder / "topology.toml"
        topology.write_text(
            f'[gateway]\nbind = "127.0.0.1:{gateway}"\nuse_llm_servers = false\n'
            f'[dashboard]\nbind = "127.0.0.1:{dashboard}"\nruns = "{self.runs}"\n'
        )
        self._log = folder / "log"
        command = [*PRORL, "serve", "--sandbox", "process", "--config", str(topology), "--run-dir", str(self.run_dir)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)

    def client(self, session: str | None = None) -> RolloutClient:
        return RolloutClient(self.front_door, session=session, timeout_s=90)

    def address(self) -> str:
        """The dashboard's, with its key, as `prorl serve` prints it."""
        found: list[str] = []

        def printed() -> bool:
            found.extend(re.findall(r"open (http\S+)", self._log.read_text()))
            return bool(found)

        until(printed, "the dashboard's address")
        return found[-1]

    def make_long(self, text: str) -> None:
        """Have the first rollout of the run `after` begin with this text."""
        file = min((self.runs / "after" / "trajectories").glob("*.json"))
        transcript = msgspec.json.decode(file.read_bytes(), type=Transcript)
        first, second, *others = transcript.turns
        turns = (first, msgspec.structs.replace(second, text=text), *others)
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(transcript, turns=turns)))

    def kill_rollout_broker(self) -> None:
        (broker,) = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if {"broker", "rollout"} <= set(words_of(child))
        ]
        broker.kill()

    @contextmanager
    def prorl(self, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """A further process, such as a gateway with keys."""
        environment = {**os.environ, "PRORL_RUN_DIR": str(self.run_dir), **variables}
        process = subprocess.Popen([*PRORL, *arguments], env=environment, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = Service(Path(folder))
        try:
            with service.client() as client:
                client.submit(problem())
                assert [trajectory.outcome for trajectory in client.stream()] == ["completed"]
            yield service
        finally:
            service.process.send_signal(signal.SIGTERM)
            service.process.wait(40)


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
def dashboard(service: Service, page: Page) -> Page:
    """The dashboard, opened by its own address."""
    page.goto(service.address())
    page.locator("#state.is-live").wait_for()
    return page
