from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from prorl_zmq.metrics.catalog import JOBS_ENDED, PROCESSES, SLOTS, TURNS
from prorl_zmq.metrics.metric import Metric
from prorl_zmq.metrics.report import CHUNK, INBOX, MetricsReport
from prorl_zmq.metrics.reporter import MetricsReporter
from prorl_zmq.system.run_folder import own_run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as inbox:
        inbox.bind(str(tmp_path / INBOX))
        yield inbox


def received(inbox: socket.socket) -> list[MetricsReport]:
    found = []
    while True:
        try:
            found.append(msgspec.msgpack.decode(inbox.recv(2**18), type=MetricsReport))
        except BlockingIOError:
            return found


def counted(reports: list[MetricsReport], name: str) -> dict[tuple[str, ...], float]:
    rows = [row for report in reports for row in report.rows if row[0] == name]
    return {labels: sum(row[2][0] for row in rows if row[1] == labels) for _, labels, _ in rows}


def test_without_a_collector_nothing_is_switched_on_and_nothing_sent(tmp_path: Path) -> None:
    reporter = MetricsReporter(own_run_dir(tmp_path / "run"), "gateway")
    assert not Metric.counting
    reporter.report_if_due(0.0)
    reporter.close()


@pytest.mark.usefixtures("counting")
class TestWithACollector:
    def test_what_was_counted_arrives_once_and_gauges_each_time(self, tmp_path: Path, inbox: socket.socket) -> None:
        reporter = MetricsReporter(tmp_path, "gateway", lambda: SLOTS.set(4, "run"))
        TURNS.add("math", amount=3)
        reporter.report()
        reporter.report()
        first, second = received(inbox)
        assert counted([first], TURNS.name) == {("math",): 3.0}
        assert counted([second], TURNS.name) == {}
        for report in (first, second):
            assert counted([report], SLOTS.name) == {("run",): 4.0}
            assert counted([report], PROCESSES.name) == {("gateway",): 1.0}
            (memory,) = counted([report], "prorl_process_resident_memory_bytes").values()
            assert 2**20 < memory < 2**36
        assert (second.life, second.number) == (first.life, first.number + 1)
        reporter.close()

    def test_what_the_collector_cannot_take_now_it_gets_later(self, tmp_path: Path, inbox: socket.socket) -> None:
        """The kernel queues few datagrams; a process must neither wait nor lose what it counted."""
        reporter = MetricsReporter(tmp_path, "gateway")
        sent = 2000
        for _ in range(sent):
            TURNS.add("math")
            reporter.report()
        early = received(inbox)
        assert 0 < len(early) < sent
        reporter.close()
        assert counted([*early, *received(inbox)], TURNS.name) == {("math",): float(sent)}

    def test_many_rows_go_in_several_datagrams(self, tmp_path: Path, inbox: socket.socket) -> None:
        reporter = MetricsReporter(tmp_path, "gateway")
        rows = {(f"task-{number % 60}", "failed", f"code-{number // 60}") for number in range(3 * CHUNK)}
        for row in rows:
            JOBS_ENDED.add(*row)
        reporter.report()
        reports = received(inbox)
        assert len(reports) > 1
        assert len({report.number for report in reports}) == 1
        assert sum(counted(reports, JOBS_ENDED.name).values()) == len(rows)
        reporter.close()

    def test_a_collector_that_is_gone_ends_nothing(self, tmp_path: Path, inbox: socket.socket) -> None:
        reporter = MetricsReporter(tmp_path, "gateway")
        inbox.close()
        reporter.report()  # refused: nobody is bound there
        (tmp_path / INBOX).unlink()
        TURNS.add("math")
        reporter.report()
        assert counted([MetricsReport("", 0, 0, list(TURNS.rows()))], TURNS.name) == {("math",): 1.0}
        reporter.close()

    def test_gauges_that_cannot_be_read_are_said_once(
        self, tmp_path: Path, inbox: socket.socket, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            raise LookupError("no such backend")

        reporter = MetricsReporter(tmp_path, "gateway", fail)
        reporter.report()
        reporter.report()
        assert [record.getMessage() for record in caplog.records] == ["metrics could not be read; this is said once"]
        assert len(received(inbox)) == 2
        reporter.close()

    def test_a_loop_that_asks_in_each_round_reports_once_a_second(self, tmp_path: Path, inbox: socket.socket) -> None:
        reporter = MetricsReporter(tmp_path, "gateway")
        for tenth in range(25):
            reporter.report_if_due(tenth / 10)
        assert len(received(inbox)) == 3
        reporter.close()

    def test_a_task_reports_until_it_is_cancelled(self, tmp_path: Path, inbox: socket.socket) -> None:
        async def main() -> MetricsReport:
            reporter = MetricsReporter(tmp_path, "gateway")
            task = asyncio.create_task(reporter.report_forever())
            packed = await asyncio.get_running_loop().sock_recv(inbox, 2**18)
            task.cancel()
            reporter.close()
            return msgspec.msgpack.decode(packed, type=MetricsReport)

        assert counted([asyncio.run(main())], PROCESSES.name) == {("gateway",): 1.0}
