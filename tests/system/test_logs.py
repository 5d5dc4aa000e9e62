"""What is logged is one line of harmless text, with the fields of the job that it is about."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.system import logs
from prorl_zmq.system.logs import (
    JsonFormatter,
    TextFormatter,
    about_job,
    keep_secret,
    of_job,
    one_line,
    say,
    start_logging,
)

NASTY = "one\ntwo\r\x1b[31mred\x1b[0m\x00\x7f\x9b\u2028three\u202eright-to-left\ud800"
FORMATTERS = [TextFormatter("run-1"), JsonFormatter("run-1")]


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_secrets", [])


def record(message: object, *args: Any, exc_info: Any = None, **extra: Any) -> logging.LogRecord:
    log = logging.getLogger("prorl.test")
    return log.makeRecord(log.name, logging.WARNING, __file__, 1, message, args, exc_info, extra=extra)


@pytest.mark.parametrize("formatter", FORMATTERS, ids=["text", "json"])
@given(text=st.text(st.characters()), field=st.text(st.characters()))
def test_whatever_is_said_a_line_stays_one_line_of_printable_characters(
    formatter: logging.Formatter, text: str, field: str
) -> None:
    line = formatter.format(record("a tool said %s", text, job_id=field))
    assert len(line.splitlines()) == 1
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]", line)
    if isinstance(formatter, JsonFormatter):
        told = "".join(map(str, json.loads(line).values()))
        assert not re.search("[\x00-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]", told)


def test_control_characters_are_written_as_escapes() -> None:
    assert one_line(NASTY) == ("one\\ntwo\\r\\x1b[31mred\\x1b[0m\\x00\\x7f\\x9b\\u2028three\\u202eright-to-left\\ud800")
    assert one_line("a\u200bb\u061c\xad\ufeff\U000e0041") == "a\\u200bb\\u061c\\xad\\ufeff\\U000e0041"  # not seen
    assert one_line("Grüße, 你好 → 🙂") == "Grüße, 你好 → 🙂"


@pytest.mark.parametrize("formatter", FORMATTERS, ids=["text", "json"])
def test_a_text_of_a_megabyte_is_cut(formatter: logging.Formatter) -> None:
    line = formatter.format(record("a tool said %s", "x\n" * 2**19, job_id="j" * 2**20))
    assert len(line) < 12_000
    assert "more characters)" in line


@pytest.mark.parametrize("formatter", FORMATTERS, ids=["text", "json"])
def test_arguments_that_do_not_fit_cost_no_line(formatter: logging.Formatter) -> None:
    assert "50 %d" in formatter.format(record("50 %d", "no number"))


def test_a_json_line_has_the_fields_of_its_job() -> None:
    line = json.loads(
        JsonFormatter("run-1").format(record("it %s", "failed", **of_job("job-1", 2, "run", backend="b")))
    )
    at = datetime.fromisoformat(line.pop("time"))
    assert abs((datetime.now(UTC) - at).total_seconds()) < 60
    assert line == {
        "level": "warning",
        "logger": "prorl.test",
        "process": "run-1",
        "event": "it failed",
        "job_id": "job-1",
        "attempt": 2,
        "phase": "run",
        "backend": "b",
    }


def test_a_text_line_has_them_behind_its_text() -> None:
    line = TextFormatter("run-1").format(record("it failed", **of_job("job-1", 2, "run")))
    assert line.endswith("W run-1: it failed job_id=job-1 attempt=2 phase=run")


def test_a_traceback_cannot_look_like_lines_of_its_own() -> None:
    try:
        raise ValueError("12:00:00 E run-1 prorl.test: forged\n12:00:00 E run-1 prorl.test: forged too\x1b[2J")
    except ValueError:
        bad = record("it raised", exc_info=sys.exc_info())
    first, *others = TextFormatter("run-1").format(bad).splitlines()
    assert first.endswith("it raised")
    assert len(others) >= 4
    assert all(line.startswith("  | ") and "\x1b" not in line for line in others)
    line = json.loads(JsonFormatter("run-1").format(bad))
    assert line["traceback"][0] == "Traceback (most recent call last):"
    assert line["traceback"][-1] == "12:00:00 E run-1 prorl.test: forged too\\x1b[2J"


def test_a_task_and_what_it_starts_log_of_its_job_and_no_other() -> None:
    formatter = JsonFormatter("run-1")
    seen: dict[str, Any] = {}

    async def deep(name: str) -> None:
        await asyncio.sleep(0)
        seen[name] = json.loads(formatter.format(record("deep"))).get("job_id")

    async def phase(job_id: str) -> None:
        with about_job(job_id, 1, "run"):
            await asyncio.gather(deep(job_id), asyncio.create_task(deep(f"{job_id}-task")))
        await deep(f"{job_id}-after")

    async def main() -> None:
        await asyncio.gather(phase("a"), phase("b"), deep("other"))

    asyncio.run(main())
    assert seen == {"a": "a", "a-task": "a", "b": "b", "b-task": "b", "a-after": None, "b-after": None, "other": None}


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("formatter", FORMATTERS, ids=["text", "json"])
def test_a_secret_is_never_written_whoever_says_it(formatter: logging.Formatter) -> None:
    keep_secret("sk-12345678")
    keep_secret("sk-12345678-long")
    keep_secret(None)
    try:
        raise ValueError("wrong key sk-12345678-long")
    except ValueError:
        said = record("401: key %s is not known", "sk-12345678", exc_info=sys.exc_info(), backend="sk-12345678")
    line = formatter.format(said)
    assert "sk-12345678" not in line
    assert "-long" not in line
    assert line.count("[secret]") == 4  # the source line in the traceback quotes it too


@pytest.mark.usefixtures("logging_kept")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_levels_and_warnings(log_format: Any, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("init-1", log_format, "debug")
    start_logging("init-1", log_format, "info")
    logging.getLogger("prorl.stage").debug("not this")
    logging.getLogger("prorl.stage").info("this once")
    logging.getLogger("other").info("nor this")
    logging.getLogger("py.warnings").warning("%s", "of an interpreter")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "this once" in lines[0]
    assert "of an interpreter" in lines[1]
    assert all("init-1" in line for line in lines)


@pytest.mark.usefixtures("logging_kept")
def test_what_a_program_says_is_a_line_of_its_log_where_that_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("serve")
    say("prorl serve", "ready\nat \x1b[1mdoor")
    assert capsys.readouterr().err == "prorl serve: ready at \\x1b[1mdoor\n"
    start_logging("serve", "json")
    say("prorl serve", "ready at door")
    line = json.loads(capsys.readouterr().err)
    assert (line["process"], line["level"], line["event"]) == ("serve", "info", "ready at door")
