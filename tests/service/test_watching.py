"""Watchers of a real service: the watcher that pages and terminals share, and `prorl top`."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.commands import prorl
from support.waiting import until
from textual.widgets import DataTable

from prorl_zmq import AsyncRolloutClient
from prorl_zmq.commands.top_app import HEADERS, Top, _cells
from prorl_zmq.errors import RequestTimeout, UnknownBatch, UnknownJob
from prorl_zmq.inference.embedded_engine import load_embedded_engine
from prorl_zmq.watching import watcher as watcher_module
from prorl_zmq.watching.watcher import BACKEND_BROKER, Watcher
from prorl_zmq.wire.messages.jobs import Outcome, Phase
from prorl_zmq.wire.messages.watching import JobRow

from .conftest import SETTINGS, TestService, in_process, scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from textual.pilot import Pilot

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
            assert (watcher.broker_of(job_id), watcher.broker_of("x")) == (BROKER, "")

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


async def shown(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Wait until the screen shows something: it is drawn anew several times a second."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await pilot.pause(0.05)


@pytest.mark.proof
def test_prorl_top_shows_the_service_and_names_a_broker_that_is_away(
    local_service: LocalService, tmp_path: Path
) -> None:
    async def look() -> None:
        async with watcher_of(local_service) as watcher:
            app = Top(watcher)
            async with app.run_test(size=(140, 40)) as pilot:

                def screen() -> str:
                    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())

                table = app.query_one("#table", DataTable)
                await shown(pilot, lambda: "1 rollout broker " in screen() and "INIT" in screen())
                assert all(text in screen() for text in ("stages", "backends", "there are none yet", "tasks: scripted"))
                await pilot.press("2")
                await shown(pilot, lambda: table.row_count == 1)
                assert all(text in screen() for text in (job_id, "run held", "scripted"))
                assert "1 of 1 jobs" in screen()
                await pilot.press("f", "f")
                await shown(pilot, lambda: "which: ended" in screen())
                assert table.row_count == 0
                await pilot.press("f", "f", "slash", *"nothing")
                await shown(pilot, lambda: "with: nothing" in screen())
                assert table.row_count == 0
                await pilot.press("escape")
                await shown(pilot, lambda: table.row_count == 1)
                await pilot.press("4")
                await shown(pilot, lambda: "local" in screen() and "ready" in screen())
                await pilot.press("3")
                await shown(pilot, lambda: "context" in screen())

                local_service.brokers.stop("rollout")
                await shown(pilot, lambda: f"{BROKER} does not answer" in screen())
                local_service.brokers.start_rollout_broker()
                (tmp_path / "mark.go").touch()
                await pilot.press("1")
                await shown(pilot, lambda: "does not answer" not in screen() and "completed" in screen())
                assert job_id[-10:] in screen()
                await pilot.press("q")
            assert app.return_code == 0

    with job_that_waits(local_service, tmp_path) as job_id:
        asyncio.run(look())


def test_prorl_top_shows_the_open_batches_and_what_each_waits_for(local_service: LocalService, tmp_path: Path) -> None:
    async def look(batch: Batch) -> None:
        async with watcher_of(local_service) as watcher:
            app = Top(watcher)
            async with app.run_test(size=(80, 30)) as pilot:

                def screen() -> str:
                    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())

                await shown(pilot, lambda: "INIT" in screen())
                assert "up for" not in screen()  # the head says it
                await pilot.press("5")
                await shown(pilot, lambda: "step-7 waits for 2 more groups to be kept: " in screen())
                assert "0 of 2" in screen()
                (line,) = (line for line in screen().splitlines() if "0 of 2" in line)
                assert ("step-7" in line, "open" in line) == (True, True)
                assert "1 rollout under way" in screen()
                (tmp_path / "mark.go").touch()
                await shown(pilot, lambda: "━ 1 of 2" in screen())
                assert all(
                    name in screen() for name in ("groups kept", "under way", "jobs", "dropped", "failed", "q quit")
                )
                await asyncio.to_thread(batch.close)
                await shown(pilot, lambda: "No batch is open." in screen())
                assert "waits for" not in screen()
                await pilot.press("q")

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
    cells = _cells(row, 5.0)
    assert len(cells) == len(HEADERS)
    for cell in cells:
        assert cell.plain.isprintable()
    assert cells[0].plain.startswith("[red]")
    assert cells[3].plain == "2.000 s"


def test_prorl_top_into_a_pipe_says_what_to_use() -> None:
    done = prorl("top")
    assert (done.returncode, done.stdout) == (2, "")
    assert "prorl top needs a terminal; `prorl status` prints the same once" in done.stderr
