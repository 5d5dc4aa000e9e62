from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from prorl_zmq.metrics.report import INBOX, OUTLET, MetricsReport
from prorl_zmq.service.metrics_inbox import ASKERS_LIMIT, MetricsInbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("counting")


async def text(run_dir: Path) -> str:
    reader, writer = await asyncio.open_unix_connection(run_dir / OUTLET)
    told = (await reader.read()).decode()
    writer.close()
    return told


async def until_told(run_dir: Path, *lines: str) -> str:
    async with asyncio.timeout(20):
        told = await text(run_dir)
        while not {*lines} <= {*told.splitlines()}:
            await asyncio.sleep(0.01)
            told = await text(run_dir)
    return told


@asynccontextmanager
async def sender(run_dir: Path) -> AsyncIterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as one:
        one.connect(str(run_dir / INBOX))
        yield one


def slots(number: float, pid: int = 7) -> bytes:
    return msgspec.msgpack.encode(MetricsReport(f"life {pid}", pid, 1, [("prorl_slots", ("run",), [number])]))


def test_what_is_reported_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "sandboxes" / "one").mkdir(parents=True)
        (tmp_path / "sandboxes" / ".making").mkdir()
        async with MetricsInbox(tmp_path).open(), sender(tmp_path) as process:
            process.send(slots(3))
            told = await until_told(tmp_path, 'prorl_slots{role="run"} 3.0', "prorl_sandboxes 1.0")
            assert 'prorl_processes{process="supervisor"} 1.0' in told
            assert 'prorl_build_info{version="' in told

    asyncio.run(main())


def test_the_last_word_of_a_process_that_has_ended_brings_nothing_back(tmp_path: Path) -> None:
    """Its report lay in the socket when the supervisor heard of its end, and its gauges stayed for ten seconds."""

    async def main() -> None:
        inbox = MetricsInbox(tmp_path)
        async with inbox.open(), sender(tmp_path) as process:
            process.send(slots(3))
            inbox.ended(7)
            assert "prorl_slots{" not in await text(tmp_path)

    asyncio.run(main())


def test_what_is_malformed_is_said_once_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with MetricsInbox(tmp_path).open(), sender(tmp_path) as process:
            no_text, too_deep = b"\x94\xa1\xff\x01\x01\x90", b"\x95\xa1a\x01\x01\x90" + b"\x91" * 100_000
            for datagram in (b"", b"\xff", no_text, too_deep, msgspec.msgpack.encode([1, 2, 3]), slots(3)):
                process.send(datagram)
            await until_told(tmp_path, 'prorl_slots{role="run"} 3.0')

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records if "malformed" in record.getMessage()] != []
    assert len(caplog.records) == 1


def test_askers_that_do_not_read_are_few_and_hold_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.service.metrics_inbox.TELL_S", 0.5)

    async def main() -> None:
        inbox = MetricsInbox(tmp_path)
        monkeypatch.setattr(inbox._collector, "text", lambda _: bytes(2**22))
        async with inbox.open():
            idle = [await asyncio.open_unix_connection(tmp_path / OUTLET) for _ in range(2 * ASKERS_LIMIT)]
            assert len(await text(tmp_path)) == 2**22
            for _, writer in idle:
                writer.transport.abort()

    asyncio.run(main())


def test_where_no_socket_can_be_bound_the_service_goes_on_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / INBOX).mkdir()

    async def main() -> None:
        inbox = MetricsInbox(tmp_path)
        async with inbox.open():
            inbox.ended(7)
            inbox.restarted("stage_run")
            assert not (tmp_path / OUTLET).exists()

    asyncio.run(main())
    (record,) = caplog.records
    assert record.getMessage().startswith("no metrics are collected: ")
