"""Watchers of a real service: the watcher that pages and terminals share, and `prorl top`."""

from __future__ import annotations

import asyncio
import io
import os
import select
import tempfile
import termios
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console
from support import forks
from support.commands import prorl
from support.waiting import until

from prorl_zmq import AsyncRolloutClient
from prorl_zmq.commands.top import HEADERS, Top, cells
from prorl_zmq.errors import RequestTimeout, UnknownBatch, UnknownJob
from prorl_zmq.inference.embedded.embedded_engine import load_embedded_engine
from prorl_zmq.watching import watcher as watcher_module
from prorl_zmq.watching.watcher import BACKEND_BROKER, Watcher
from prorl_zmq.wire.messages.jobs import Outcome, Phase
from prorl_zmq.wire.messages.watching import JobRow

from .conftest import SETTINGS, TestService, in_process, scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from support.services import SharedService

    from prorl_zmq import Batch
    from prorl_zmq.testing import LocalService
    from prorl_zmq.watching.overview import Update

WAIT_S = 40.0
BROKER = "rollout"


@pytest.fixture(autouse=True)
def _short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "ANSWER_S", 1.0)


@asynccontextmanager
async def watcher_of(service: LocalService) -> AsyncIterator[Watcher]:
    async with AsyncRolloutClient(service.front_door, timeout_s=2.0) as client:
        yield Watcher({BROKER: client}, interval_s=0.1)


class Page:
    """Applies updates, as a page does."""

    def __init__(self, updates: AsyncIterator[Update]) -> None:
        self.updates = updates
        self.rows: dict[str, JobRow] = {}
        self.resets = 0

    async def until(self, condition: Callable[[Update], object]) -> Update:
        async with asyncio.timeout(WAIT_S):
            async for update in self.updates:
                if update.reset:
                    self.rows.clear()
                    self.resets += 1
                self.rows.update((row.job_id, row) for row in update.changed)
                if condition(update):
                    return update
        raise AssertionError("no more updates")

    def places(self) -> dict[str, str]:
        return {job_id: f"{row.phase} {row.place}" for job_id, row in self.rows.items()}


@contextmanager
def job_that_waits(service: LocalService, folder: Path) -> Iterator[str]:
    """A job whose RUN lasts until this ends."""
    mark = folder / "mark"
    with service.client() as client:
        (job_id,) = client.submit(msgspec.structs.replace(scripted(run="wait", mark=str(mark)), group_id="g"))
        until(lambda: (folder / "mark.waits").exists(), "RUN to begin")
        try:
            yield job_id
        finally:
            (folder / "mark.go").touch()


@pytest.mark.proof
def test_a_watcher_tells_what_changes_and_goes_on_when_the_broker_was_restarted(
    local_service: LocalService, tmp_path: Path
) -> None:
    async def watch() -> None:
        async with watcher_of(local_service) as watcher, watcher.viewer() as updates:
            page = Page(updates)
            update = await page.until(lambda update: job_id in page.rows and not update.overview.problems)
            row = page.rows[job_id]
            assert (row.task, row.group_id, row.phase, row.place, row.node) == ("scripted", "g", "run", "held", "local")
            assert update.overview.status is not None
            assert {stage.role for stage in update.overview.status.stages} == {"init", "run", "eval"}

            local_service.brokers.stop("rollout")
            update = await page.until(lambda update: BROKER in update.overview.problems)
            assert update.overview.status is None
            assert job_id in page.rows  # what was known is still shown
            local_service.brokers.start_rollout_broker()
            await page.until(lambda update: not update.overview.problems and update.reset)
            assert page.places() == {job_id: "run held"}

            async with watcher.viewer() as others:
                other = Page(others)
                await other.until(lambda update: job_id in other.rows)
                (tmp_path / "mark.go").touch()
                for each in (page, other):
                    await each.until(lambda _, each=each: each.places().get(job_id) == "eval ended")
            assert page.rows[job_id].reward == 0.5
            update = await page.until(lambda update: any(one.outcomes for one in update.overview.ended))
            assert sum(sum(one.outcomes.values()) for one in update.overview.ended) == 1

    with job_that_waits(local_service, tmp_path) as job_id:
        asyncio.run(watch())


def test_a_viewer_that_is_slow_gets_all_changes_as_one_update_and_nothing_is_asked_while_nobody_looks(
    local_service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch() -> None:
        async with watcher_of(local_service) as watcher, AsyncRolloutClient(local_service.front_door) as client:
            async with watcher.viewer() as slow, watcher.viewer() as quick:
                first, second = Page(slow), Page(quick)
                await first.until(lambda update: update.overview.status)
                ids = set(await client.submit([scripted() for _ in range(20)]))
                ended = lambda: {job_id for job_id, place in second.places().items() if place == "eval ended"}  # noqa: E731
                await second.until(lambda _: ended() == ids)
                update = await first.until(lambda update: update.changed)
                assert {row.job_id for row in update.changed} == ids
                assert len(update.changed) == 20
            assert watcher._tasks == []
            # Rows of more jobs than a viewer is told one by one to forget are sent anew.
            monkeypatch.setattr(watcher_module, "FORGOTTEN_LIMIT", 5)
            async with watcher.viewer() as updates:
                page = Page(updates)
                await page.until(lambda update: set(page.rows) == ids)
                watcher._mirrors[BROKER]._limit = 10
                more = await client.submit([scripted() for _ in range(4)])
                await page.until(lambda update: set(more) <= set(page.rows) and len(page.rows) <= 10)
                assert page.resets == 2

    asyncio.run(watch())


def test_what_a_job_brought_is_seen_before_and_after_its_client_has_it() -> None:
    engine = load_embedded_engine(None)
    with in_process(engine=engine) as service, service.client() as trainer, service.client() as operator:
        (job_id,) = trainer.submit(scripted(run="converse"))
        until(lambda: operator.status().uncollected, "the job to end")
        before, seen = operator.views.peek(job_id)
        (trajectory,) = trainer.collect()
        trainer.collect(wait_s=0.0)  # acknowledges it
        assert operator.status().uncollected == 0
        after, again = operator.views.peek(job_id)
        assert before == after == trajectory.result
        assert seen is not None
        assert again is not None
        assert list(seen.token_ids) == list(again.token_ids) == list(trajectory.token_ids) != []
        steps = [step for step in after.steps if step.name == "engine"]
        assert steps
        assert sum(step.seconds for step in steps) <= after.timings["engine"] + 1e-9
        assert all(0 <= step.start_s <= step.start_s + step.seconds <= after.timings["run"] for step in steps)
        with pytest.raises(UnknownJob, match="was never submitted here"):
            operator.views.peek("x")


def test_an_open_batch_is_seen_from_near(local_service: LocalService, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with local_service.client() as trainer, local_service.client() as operator:
        with trainer.open_batch(1, 2, batch_id="batch") as batch:
            batch.feed([scripted(run="second waits", eval="alternate", mark=str(mark))])
            with pytest.raises(RequestTimeout):
                batch.next_group(timeout_s=0.0)
            view = operator.views.batch("batch")
            while {cell.state for cell in view.groups[0].cells} != {"in", "running"}:
                view = operator.views.batch("batch")
            (group,) = view.groups
            (done,) = [cell for cell in group.cells if cell.state == "in"]
            assert (group.state, done.reward, view.current_version) == ("under_way", 0.0, 0)
            assert "1 rollout under way" in view.waits_for
            (tmp_path / "mark.go").touch()
        view = operator.views.batch("bat")
        assert (view.is_closed, view.status.state, view.groups, view.rollouts) == (True, "open", (), 2)
        local_service.brokers.stop("rollout")
        local_service.brokers.start_rollout_broker()
        with pytest.raises(UnknownBatch, match="none over a restart of the rollout broker"):
            operator.views.batch("batch")


def test_a_broker_that_is_away_holds_up_no_other(empty_service: TestService) -> None:
    """Two brokers of one service, one of which ends."""
    folder = tempfile.TemporaryDirectory(prefix="prorl-t-")
    other = TestService(Path(folder.name), SETTINGS)

    async def watch() -> None:
        doors = {"a": empty_service.front_door, "b": other.front_door}
        async with AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(AsyncRolloutClient(door, timeout_s=2.0))
                for name, door in doors.items()
            }
            watcher = Watcher(clients, interval_s=0.1)
            updates = await stack.enter_async_context(watcher.viewer())
            page = Page(updates)
            update = await page.until(lambda update: len(update.overview.brokers) == 2)
            assert update.overview.status is not None
            assert set(update.overview.problems) <= {BACKEND_BROKER}
            empty_service.brokers.stop("rollout")
            empty_service.brokers.start_backend_broker()
            update = await page.until(
                lambda update: update.overview.backends is not None and "a" in update.overview.problems
            )
            assert (set(update.overview.brokers), set(update.overview.problems)) == ({"b"}, {"a"})
            empty_service.brokers.stop("backend")
            update = await page.until(lambda update: BACKEND_BROKER in update.overview.problems)
            assert (update.overview.backends, set(update.overview.brokers)) == (None, {"b"})

    try:
        other.brokers.topology = msgspec.structs.replace(
            other.topology,
            backend_broker=msgspec.structs.replace(
                other.topology.backend_broker, endpoint=empty_service.backend_broker
            ),
        )
        empty_service.brokers.start_rollout_broker()
        other.brokers.start_rollout_broker()
        asyncio.run(watch())
    finally:
        other.close()
        folder.cleanup()


class Terminal:
    """What `prorl top` shows on a terminal of this size."""

    def __init__(self, watcher: Watcher, width: int, height: int) -> None:
        self.top = Top(watcher)
        self._screen = Console(width=width, height=height, force_terminal=False, file=io.StringIO())
        self._drawn = asyncio.Event()

    @asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        following = asyncio.create_task(self.top.follow(self._drawn.set))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def text(self) -> str:
        with self._screen.capture() as capture:
            self._screen.print(self.top.frame(self._screen))
        return capture.get()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.top.press(key)

    async def until(self, condition: Callable[[str], object]) -> None:
        """Wait until the screen shows something; it is drawn with each update."""
        async with asyncio.timeout(WAIT_S):
            while not condition(self.text()):
                self._drawn.clear()
                await self._drawn.wait()


@pytest.mark.proof
def test_prorl_top_shows_the_service_and_names_a_broker_that_is_away(
    local_service: LocalService, tmp_path: Path
) -> None:
    async def look() -> None:
        async with watcher_of(local_service) as watcher:
            terminal = Terminal(watcher, 140, 40)
            async with terminal.live():
                await terminal.until(lambda text: "1 rollout broker " in text and "INIT" in text)
                first = terminal.text()
                assert all(text in first for text in ("stages", "backends", "there are none yet", "tasks: scripted"))
                terminal.press("2")
                await terminal.until(lambda text: "1 of 1 jobs" in text)
                assert all(text in terminal.text() for text in (job_id, "run held", "scripted"))
                terminal.press("f", "f")
                assert "0 of 0 jobs, the last to change   which: ended" in terminal.text()
                terminal.press("f", "f", "/", *"nothingg", "\x7f", "\n")
                assert "0 of 0 jobs, the last to change   which: all   with: nothing " in terminal.text()
                terminal.press("\x1b")
                assert "1 of 1 jobs" in terminal.text()
                terminal.press("4")
                await terminal.until(lambda text: "local" in text and "ready" in text)
                terminal.press("3")
                assert "context" in terminal.text()

                local_service.brokers.stop("rollout")
                await terminal.until(lambda text: f"{BROKER} does not answer" in text)
                local_service.brokers.start_rollout_broker()
                (tmp_path / "mark.go").touch()
                terminal.press("1")
                await terminal.until(lambda text: "does not answer" not in text and "completed" in text)
                assert job_id[-10:] in terminal.text()
                assert not terminal.top.quitting.is_set()
                terminal.press("q")
                assert terminal.top.quitting.is_set()

    with job_that_waits(local_service, tmp_path) as job_id:
        asyncio.run(look())


def test_prorl_top_shows_the_open_batches_and_what_each_waits_for(local_service: LocalService, tmp_path: Path) -> None:
    async def look(batch: Batch) -> None:
        async with watcher_of(local_service) as watcher:
            terminal = Terminal(watcher, 80, 30)
            async with terminal.live():
                await terminal.until(lambda text: "INIT" in text)
                assert "up for" not in terminal.text()  # the head says it
                terminal.press("5")
                await terminal.until(lambda text: "step-7 waits for 2 more groups to be kept: " in text)
                (line,) = (line for line in terminal.text().splitlines() if "step-7" in line and "open" in line)
                assert " open  0 of 2 " in line
                assert "1 rollout under way" in terminal.text()
                (tmp_path / "mark.go").touch()
                await terminal.until(lambda text: " 1 of 2 " in text)
                assert all(name in terminal.text() for name in ("kept", "dropped", "failed", "q quit"))
                await asyncio.to_thread(batch.close)
                await terminal.until(lambda text: "No batch is open." in text)
                assert "waits for" not in terminal.text()

    with local_service.client() as client, client.open_batch(2, 1, keep="all", batch_id="step-7") as batch:
        batch.feed(scripted(run="wait", mark=str(tmp_path / "mark")), last=False)
        with pytest.raises(RequestTimeout):
            batch.next_group(timeout_s=0.0)
        until(lambda: (tmp_path / "mark.waits").exists(), "RUN to begin")
        asyncio.run(look(batch))


def test_what_others_have_named_is_shown_as_text_of_one_line() -> None:
    hostile = "[red]\x1b[2J\n[/red]"
    row = JobRow(
        hostile,
        hostile,
        hostile,
        Phase.RUN,
        "ended",
        1,
        1.0,
        2.0,
        hostile,
        hostile,
        hostile,
        3.0,
        Outcome.FAILED,
        hostile,
    )
    line = cells(row, 5.0)
    assert len(line) == len(HEADERS)
    for cell in line:
        assert cell.plain.isprintable()
    assert line[0].plain.startswith("[red]")
    assert line[3].plain == "2.000 s"


def test_prorl_top_draws_on_a_terminal_and_leaves_it_as_it_was(served: SharedService) -> None:
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    words = ["-m", "prorl_zmq.cli", "prorl", "top", "--connect", served.front_door]
    process = forks.start(*words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    drawn = ""

    def draws(text: str) -> bool:
        nonlocal drawn
        if select.select([ours], [], [], 0.0)[0]:
            drawn += os.read(ours, 65_536).decode("utf-8", "replace")
        return text in drawn

    try:
        until(lambda: draws("rollout broker") and draws("INIT"), "the overview")
        os.write(ours, b"2")
        until(lambda: draws("which: all"), "the jobs")
        os.write(ours, b"f")
        until(lambda: draws("which: under way"), "the jobs that are under way")
        os.write(ours, b"q")
        until(lambda: draws("\x1b[?1049l"), "the end")  # the screen as it was before
        assert process.wait(WAIT_S) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_prorl_top_into_a_pipe_says_what_to_use() -> None:
    done = prorl("top")
    assert (done.returncode, done.stdout) == (2, "")
    assert "prorl top needs a terminal; `prorl status` prints the same once" in done.stderr
