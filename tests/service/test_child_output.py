"""What a child's last lines say, and where they go."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.service.child_output import TAIL_BYTES, ChildOutput, reason_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "it said nothing"),
        ("\n  \n---\n", "it said nothing"),
        ("Traceback (most recent call last):\n  File x\nValueError: no such model\n\n", "ValueError: no such model"),
        (
            "prorl-engine: cannot start: no memory\nprorl-engine: cannot start: too little memory\nbye\n",
            "too little memory",
        ),
        ('{"event": "cannot start: no memory", "level": "error"}\n{"event": "bye"}\n', "no memory"),
        ('{"event": "it ends"}\n', "it ends"),
        ("{not JSON}\n", "{not JSON}"),
        ("loading 1 %\rloading 99 %\rkilled", "killed"),
    ],
)
def test_the_reason_is_the_root_cause_or_the_last_line(output: str, reason: str) -> None:
    assert reason_of(output) == reason


def test_a_log_file_says_only_what_this_child_wrote(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "engine-0.log"
    path.parent.mkdir()
    path.write_text("of the child before\n")
    output = ChildOutput(path)
    os.write(output.write_end, b"of this one\n")
    output.close()
    assert output.tail() == "of this one\n"
    assert output.name == str(path)
    assert path.read_text() == "of the child before\nof this one\n"


def test_without_a_log_file_its_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    output = ChildOutput(None)
    text = "line\n" * TAIL_BYTES
    os.write(output.write_end, b"first\n")
    with open(output.write_end, "wb", closefd=False) as pipe:
        pipe.write(text.encode())
    output.close()
    assert output.tail() == text[-TAIL_BYTES:]
    assert capfd.readouterr().err == f"first\n{text}"
