"""What an empty job costs, in counts that do not depend on the machine: a rise fails with the name of the count.

A limit lies a little above what is counted; lower it with what was won. To raise one is a decision: say why in the
commit. Figures in time are those of bench/frontdoor.py, and of bench/guard.py from one landing to the next.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from support import counted_jobs
from support.counted_jobs import MARK

JOBS = 25
RUNS = 3
"""Of which the least counts: a process that has to wait sends messages of its own, which others need not."""
SYSTEM_CALLS = "system calls that do something"
LIMITS = {
    "messages": 13.2,
    "frames": 23.4,
    "wire bytes": 1850.0,
    "journal rows": 9.2,
    "journal bytes": 40_000.0,
    "calls of functions in the brokers": 910.0,
    "calls of functions in stage processes and the client": 352.0,
    SYSTEM_CALLS: 64.0,
}
WAITING = {
    *(
        "poll",
        "ppoll",
        "select",
        "pselect6",
        "epoll_ctl",
        "epoll_wait",
        "epoll_pwait",
        "epoll_pwait2",
        "futex",
        "getpid",
    ),
    *("read", "write", "sendto", "recvfrom", "sendmsg", "recvmsg", "sched_yield", "restart_syscall", "clock_nanosleep"),
    *("madvise", "mmap", "munmap", "brk", "mprotect"),
}
"""Calls by which threads wait, wake each other and pass bytes on, or get memory: how many depends on who runs when."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What one job takes, by what is counted."""
    found = [counted() for _ in range(RUNS)]
    least = {name: min(one[name] for one in found) for name in found[0]}
    if shutil.which("strace"):
        log = tmp_path_factory.mktemp("calls") / "log"
        counted("strace", "-f", "-qq", "-o", str(log), "-e", "signal=none")
        least[SYSTEM_CALLS] = sum(calls_between_marks(log.read_text()).values())
    return {name: number / JOBS for name, number in least.items()}


def counted(*tracer: str) -> dict[str, float]:
    """Run the jobs in a process of their own; return what all of them took."""
    command = [*tracer, sys.executable, counted_jobs.__file__, str(JOBS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def calls_between_marks(log: str) -> Counter[str]:
    """Count the system calls, but those of `WAITING`, between the two looks at `MARK`; a line is `PID CALL(…`."""
    _, inside, _ = re.split(rf'^.*"{MARK}".*$', log, flags=re.MULTILINE)
    calls = Counter(re.findall(r"^\d+ +(\w+)\(", inside, flags=re.MULTILINE))
    return Counter({name: count for name, count in calls.items() if name not in WAITING})


@pytest.mark.xdist_group("job cost")
@pytest.mark.parametrize("name", LIMITS)
def test_an_empty_job_takes_no_more_than_it_did(name: str, counts: dict[str, float]) -> None:
    if name == SYSTEM_CALLS and name not in counts:
        pytest.skip("strace counts system calls: install its Debian package")
    assert counts[name] <= LIMITS[name], f"{name}: {counts[name]:g} per empty job, limit {LIMITS[name]:g}"


def test_what_only_waits_is_not_counted() -> None:
    lines = [
        "openat(AT_FDCWD, ",
        "poll([{fd=3}",
        "<... poll resumed>) = 1",
        "fcntl(5, F_SETLK",
        "+++ exited with 0 +++",
    ]
    mark = f'stat("{MARK}", 0x7f) = -1 ENOENT'
    log = "\n".join(
        f"{pid} {line}" for pid, line in enumerate(["close(1) = 0", mark, *lines, mark, "close(2) = 0"], 10)
    )
    assert calls_between_marks(log) == {"openat": 1, "fcntl": 1}
