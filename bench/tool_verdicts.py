"""Runs an approach on the cases of tool_cases.py and judges its answers, in one process per approach.

    right     every answer is the expected one
    said      an answer is not, but the approach reported that it refused, gave up, restarted or omitted something
    wrong     an answer is not, without a report; or there was none, not even at the time limit ("hung")

The worker (`python tool_verdicts.py APPROACH`) gets the cases' names on stdin and writes a line of JSON for each. It is
a subreaper, so that all processes of an approach stay below it, also a tmux server, and are killed between two cases.
`judge` kills a worker that does not answer, and starts another with the next case.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from tool_cases import CASES
from tool_peers import APPROACHES

from prorl_zmq.tools.processes.process_tree import descendants, kill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    from tool_cases import Case, Step
    from tool_peers import Answer, Approach

RIGHT, SAID, WRONG = "right", "said", "wrong"
CASE_LIMIT_S = 60.0
"""Longest time for a case; no case's own limits sum up to so much."""
END_LIMIT_S = 1.0
"""How long what an approach started may take to its end after the close."""
PR_SET_CHILD_SUBREAPER = 36
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash", "PAGER": "cat"}
"""What all approaches' commands see; HOME is the case's folder."""


@dataclass(frozen=True)
class Verdict:
    """How an approach did in a case."""

    approach: str
    case: str
    verdict: str
    what: str = ""
    """What happened, where it is not right."""


def adopt_orphans() -> None:
    """Become the parent of all orphans below this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def command_line(pid: int) -> bytes:
    """Give the command line of a process, with NULs; empty: it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def end_all_below() -> list[str]:
    """Kill and reap all below this process, a subreaper; give the command lines of those that were alive."""
    commands = filter(None, map(command_line, descendants(os.getpid())))
    living = [command.replace(b"\0", b" ").decode("utf-8", "replace").strip() for command in commands]
    while True:
        kill(*descendants(os.getpid()))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return living


def _wait_for_ends() -> None:
    """Wait, `END_LIMIT_S` at most, until all below this process has ended."""
    until = time.monotonic() + END_LIMIT_S
    while any(command_line(pid) for pid in descendants(os.getpid())) and time.monotonic() < until:
        time.sleep(0.02)


def judge(approach: str, cases: Sequence[Case]) -> list[Verdict]:
    """Give the verdicts on an approach, in a process of its own."""
    verdicts: list[Verdict] = []
    while len(verdicts) < len(cases):
        verdicts += _judge_until_stuck(approach, cases[len(verdicts) :])
    return verdicts


def _judge_until_stuck(approach: str, cases: Sequence[Case]) -> Iterator[Verdict]:
    adopt_orphans()
    command = [sys.executable, __file__, approach]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write("".join(f"{case.name}\n" for case in cases).encode())
            worker.stdin.close()
            for case in cases:
                line = _line(worker.stdout)
                if not line:
                    yield Verdict(approach, case.name, WRONG, "hung: no answer, and no word at the time limit")
                    return
                yield Verdict(**json.loads(line))
        finally:
            worker.kill()
            worker.wait()
            end_all_below()


def _line(stream: IO[bytes]) -> bytes:
    """Read a line of an unbuffered stream, within `CASE_LIMIT_S`; empty: none came."""
    return stream.readline() if select.select([stream], [], [], CASE_LIMIT_S)[0] else b""


def _peak_bytes(pids: list[int], *, restart: bool) -> int:
    """Give the sum of the most memory that each process has held since the last restart of the count."""
    total = 0
    for pid in pids:
        if restart:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
    return total


async def _perform(approach: Approach, case: Case, folder: Path) -> tuple[str, str]:
    """Give the verdict on one case, and what happened."""
    await approach.start(folder)
    try:
        before = _peak_bytes(approach.pids(), restart=True) if case.memory_limit_bytes else 0
        notices: list[str] = []
        for step in case.steps:
            await asyncio.sleep(step.pause_s)
            command = step.command.replace("{forgery}", approach.forgery)
            if step.talk:
                answer = await approach.talk(command, step.talk, step.limit_s)
            else:
                answer = await approach.run(command, step.limit_s)
            notices += [answer.notice] * bool(answer.notice)
            if fault := _fault(step, answer):
                said = "; ".join(notices)
                return (SAID if said else WRONG), f"{step.command[:60]!r}: {fault}" + f" ({said})" * bool(said)
        if case.memory_limit_bytes:
            more = _peak_bytes(approach.pids(), restart=False) - before
            if more > case.memory_limit_bytes:
                return WRONG, f"it took {more / 2**20:.0f} MiB more memory"
    finally:
        await approach.close()
    return RIGHT, ""


def _fault(step: Step, answer: Answer) -> str:
    """Say what is not as it must be; empty: nothing."""
    fault = ""
    if answer.timed_out and step.ends in ("done", "error"):
        fault = "timed out"
    elif step.ends == "timed out" and not answer.timed_out:
        fault = f"not timed out: code {answer.exit_code}, {answer.output[:60]!r}"
    elif step.ends == "error" and not answer.exit_code and not answer.notice:
        fault = "no error"
    elif step.ends == "done" and step.code is not None and answer.exit_code != step.code:
        fault = f"code {answer.exit_code}, not {step.code}, {answer.output[:60]!r}"
    elif step.output is not None and _seen(step, answer.output) != _seen(step, step.output):
        fault = f"output {answer.output[:60]!r}"
    elif step.check is not None and not step.check(answer):
        fault = f"output {answer.output[:60]!r} … {answer.output[-20:]!r}, {len(answer.output)} bytes"
    return fault


def _seen(step: Step, output: bytes) -> bytes:
    return output if step.exact else output.replace(b"\r", b"").strip()


def _work(name: str, results: IO[str]) -> None:
    cases = {case.name: case for case in CASES}
    adopt_orphans()
    for line in sys.stdin.read().splitlines():
        case = cases[line]
        with tempfile.TemporaryDirectory(prefix="prorl-bench-", ignore_cleanup_errors=True) as folder:
            os.environ |= {**ENVIRONMENT, "HOME": folder}
            try:
                verdict, what = uvloop.run(_perform(APPROACHES[name](), case, Path(folder)))
            except Exception as error:  # noqa: BLE001  (an approach that breaks says so)
                verdict, what = SAID, f"{type(error).__name__}: {str(error)[:200]}"
            if case.leaves_nothing:
                _wait_for_ends()
            left = end_all_below()
            if case.leaves_nothing and left and verdict == RIGHT:
                verdict, what = WRONG, f"left running: {', '.join(left)}"
        results.write(json.dumps(asdict(Verdict(name, case.name, verdict, what))) + "\n")
        results.flush()


if __name__ == "__main__":
    # What an approach prints goes to stderr.
    with os.fdopen(os.dup(1), "w") as own:
        os.dup2(2, 1)
        _work(sys.argv[1], own)
