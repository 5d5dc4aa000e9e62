"""The traces that a run leaves. `tests/service/test_explain.py` has those of real runs."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from prorl_zmq import AsyncRolloutClient
from prorl_zmq.client import trace_log
from prorl_zmq.client.trace_log import TRACES, TraceLine, TraceLog

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NOBODY = "ipc:///nowhere/front_door"


def log_of(folder: Path | None, *job_ids: str) -> None:
    async def main() -> None:
        async with AsyncRolloutClient(NOBODY) as client, TraceLog(client, folder) as traces:
            for job_id in job_ids:
                traces.note(job_id)

    asyncio.run(main())


def test_without_a_folder_it_does_nothing() -> None:
    log_of(None, "job-1")


def test_each_sitting_begins_a_new_part(tmp_path: Path) -> None:
    log_of(tmp_path)
    log_of(tmp_path)
    lines = [msgspec.json.decode(line, type=TraceLine) for line in (tmp_path / TRACES).read_bytes().splitlines()]
    assert [line.began > 1e9 for line in lines] == [True, True]


def test_a_broker_that_does_not_answer_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_log, "ASK_S", 0.2)
    log_of(tmp_path, "job-1", "job-2")
    assert len((tmp_path / TRACES).read_bytes().splitlines()) == 1


def test_a_folder_that_takes_no_file_costs_the_traces_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "prorl.client"):
        log_of(tmp_path / "gone", "job-1")
    assert "`prorl explain` will know less of this run" in caplog.text
