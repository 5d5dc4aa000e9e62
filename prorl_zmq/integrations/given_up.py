"""Why prompts could not be rolled out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..wire.messages.batches import BatchReport


def why_given_up(report: BatchReport | None) -> str:
    """Say what the jobs of given-up groups ended with, such as `handler_failed 5 times`."""
    counts: Counter[str] = Counter()
    for group in report.given_up if report is not None else ():
        counts.update(group.failures)
    return ", ".join(f"{code} {count} times" for code, count in counts.most_common()) or "no reason was given"
