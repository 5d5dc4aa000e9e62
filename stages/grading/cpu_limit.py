"""Limit the CPU time of a part of a grader's work, so that rewards do not depend on the machine's load."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RESIGNAL_S = 0.05
"""Pause between signals in seconds: code in the block may swallow the first one."""


class _OutOfTime(BaseException):
    """Ends the block; derives from BaseException, so that `except Exception` lets it pass."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """End the block silently after this much processor time; a value that the block was to set is then not set.

    Requires the main thread, where Python handles signals and graders call functions.
    """

    def end(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, RESIGNAL_S)
    try:
        with contextlib.suppress(_OutOfTime):
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # again: the signal may have come before the first call
        signal.signal(signal.SIGVTALRM, before)
