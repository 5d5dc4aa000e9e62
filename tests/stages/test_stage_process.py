"""A stage process never lives on silent, and closes all that it owns."""

from __future__ import annotations

import asyncio
import logging
import socket
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from prorl_zmq.stages import stage_process
from prorl_zmq.stages.event_outbox import EventOutbox
from prorl_zmq.stages.grading.grader_pool import GraderPool
from prorl_zmq.stages.handler import AgentHandler
from prorl_zmq.stages.stage_process import StageOptions, StageProcess
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import StageLeaving, StageReport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Nothing(msgspec.Struct):
    pass


class ClosingHandler(AgentHandler[Nothing]):
    task = "closing"
    instance_type = Nothing

    def __init__(self, problem: str = "") -> None:
        self.closed = False
        self._problem = problem

    async def run(self, phase: Any) -> Any:
        raise NotImplementedError

    async def eval(self, phase: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        if self._problem == "hangs":
            await asyncio.Event().wait()
        if self._problem:
            raise RuntimeError(self._problem)
        self.closed = True


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(f"ipc://{tmp_path}/events")
        socket.rcvtimeo = 10_000
        yield socket


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_process, "FIRST_REPORT_S", 0.02)
    monkeypatch.setattr(stage_process, "CLOSE_S", 0.2)


def process(tmp_path: Path, handlers: dict[str, Any] | None = None) -> StageProcess:
    options = StageOptions(role=Phase.RUN, slots=1, connect=f"ipc://{tmp_path}/events", node="n", run_dir=tmp_path)
    return StageProcess(options, handlers or {"closing": ClosingHandler()})


def test_a_process_tells_of_its_machine(tmp_path: Path, broker: zmq.Socket[bytes]) -> None:
    told: list[StageReport] = []

    async def serve() -> None:
        served = process(tmp_path)
        serving = asyncio.create_task(served.run())
        told.append(await asyncio.to_thread(next_event, broker))
        served.stop()
        async with asyncio.timeout(20):
            await serving

    asyncio.run(serve())
    facts = told[0].facts
    assert facts is not None
    assert (facts.host, facts.version) == (socket.gethostname(), version("prorl-zmq"))
    assert facts.memory_total_bytes > 0
    assert facts.disk_total_bytes > 0


def next_event(broker: zmq.Socket[bytes]) -> Any:
    return codec.decode(broker.recv_multipart()[0], StageReport | StageLeaving)


def fail_reports(monkeypatch: pytest.MonkeyPatch, served: StageProcess, times: int) -> list[int]:
    faults: list[int] = []
    due = EventOutbox.due

    def faulty(self: EventOutbox, now: float) -> Any:
        if self is served._event_outbox and len(faults) < times:
            faults.append(len(faults))
            raise ValueError("a fault in a report")
        return due(self, now)

    monkeypatch.setattr(EventOutbox, "due", faulty)
    return faults


async def stopped_after(served: StageProcess, broker: zmq.Socket[bytes], reports: int) -> None:
    serving = asyncio.create_task(served.run())
    for _ in range(reports):
        assert isinstance(await asyncio.to_thread(next_event, broker), StageReport)
    served.stop()
    async with asyncio.timeout(20):
        await serving


def test_a_fault_in_one_report_is_logged_and_the_next_report_comes(
    tmp_path: Path, broker: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = process(tmp_path)
    faults = fail_reports(monkeypatch, served, 2)
    asyncio.run(stopped_after(served, broker, 5))
    assert len(faults) == 2
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"a report to the rollout broker failed ({number} of {stage_process.MAX_REPORT_FAILURES})" for number in (1, 2)
    ]


def test_a_process_that_cannot_report_any_more_ends_with_the_reason(
    tmp_path: Path, broker: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = process(tmp_path)
    faults = fail_reports(monkeypatch, served, 10**6)
    with pytest.raises(ValueError, match="a fault in a report"):
        asyncio.run(asyncio.wait_for(served.run(), 20))
    assert len(faults) == stage_process.MAX_REPORT_FAILURES
    events = [next_event(broker) for _ in range(len(faults) + 1)]
    assert isinstance(events[-1], StageLeaving)


def test_every_close_runs_though_others_fail_or_hang(
    tmp_path: Path, broker: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any) -> None:
        raise OSError("it does not close")

    caplog.set_level(logging.INFO, "prorl.stage")
    monkeypatch.setattr(Sandboxes, "close", fail)
    monkeypatch.setattr(GraderPool, "close", fail)
    last = ClosingHandler()
    handlers = {"fails": ClosingHandler("no"), "hangs": ClosingHandler("hangs"), "last": last}
    served = process(tmp_path, handlers)
    asyncio.run(stopped_after(served, broker, 1))
    assert last.closed
    messages = [record.getMessage() for record in caplog.records]
    assert "closing the sandboxes failed" in messages
    assert "closing the graders failed" in messages
    assert "closing the handler of the task fails failed" in messages
    assert "the handler of the task hangs did not close within 0.2 s" in messages
    assert messages[-1].endswith("ended")
