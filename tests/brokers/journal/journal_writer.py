"""Writes a journal, says what is safe, and kills itself: `journal_writer.py FILE STATEMENT [BLOCK]`.

That is before an SQL statement, or in the middle of a block.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.journal.records import Finished, JobState
from prorl_zmq.wire.messages.jobs import Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import PhaseDone


def say(event: str, sequence: int) -> None:
    print(event, sequence, flush=True)


def tear(last: int) -> None:
    """Write half of a block, and be gone."""
    write, blocks = os.pwrite, 0

    def pwrite(file: int, block: memoryview, offset: int) -> int:
        nonlocal blocks
        blocks += 1
        if blocks > last:
            write(file, block[: len(block) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, block, offset)

    os.pwrite = pwrite  # type: ignore[assignment]


def main() -> None:
    path, last = Path(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        tear(int(sys.argv[3]))
    journal = Journal(path)
    statements = 0

    def trace(statement: str) -> None:
        nonlocal statements
        statements += 1
        if statements > 30 + last:
            os.kill(os.getpid(), signal.SIGKILL)

    connection: Any = journal._file.connection  # to be killed within a transaction
    connection.set_trace_callback(trace)
    block = b"block" * 2000
    for sequence in range(1, 12):
        job = JobState(sequence, "s", f"job-{sequence}", "math", 60.0, b"\x80")
        journal.accept([job])
        say("accepted", sequence)
        run = PhaseDone(stage_id="run-1", job_id=job.job_id, attempt=2, phase=Phase.RUN)
        journal.write([job._replace(phase=Phase.EVAL, attempt=2, run=run, block=block)], [], [])
        say("ran", sequence)
        result = Result(job_id=job.job_id, task="math", outcome=Outcome.COMPLETED, reward=1.0, tokens=1)
        journal.write([], [Finished("s", result, block, b"digest", sequence)], [])
        say("ended", sequence)
        if sequence % 2:
            journal.write([], [], [sequence])
            say("acknowledged", sequence)


if __name__ == "__main__":
    main()
