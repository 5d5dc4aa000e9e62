"""What every adapter does between a framework's trainer and the service.

`Places` replaces the prompts that get no group, `Outage` waits for a service that is away, `Counts` collects a step's
figures, and `response_room` drops or cuts rollouts that are longer than the framework trains on. All are plain objects
without I/O, for blocking and asyncio adapters alike. Frameworks' own names stay in the adapters.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import Counter
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, NotTrainable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..data.group import Group
    from ..errors import ProrlError
    from ..wire.messages.batches import BatchReport
    from ..wire.messages.jobs import Job

TooLong = Literal["drop", "truncate"]

log = logging.getLogger("prorl.trainer")

ROUNDS = 3
"""How often a place is tried: with its own prompt, then with others."""
PAUSE_S = 1.0


class Places:
    """The prompts of a step, the groups that came for them, and the prompts that replace those without a group.

    Args:
        jobs: one for each place.
        spare: makes the job of another prompt; None: no prompt is replaced.
    """

    def __init__(self, jobs: Sequence[Job], spare: Callable[[], Job] | None = None) -> None:
        self._jobs = list(jobs)
        self._spare = spare
        self._rounds = ROUNDS if spare is not None else 1
        self._found: dict[str, Group] = {}
        self.replaced = 0
        """How many prompts were replaced."""

    @property
    def wanted(self) -> list[Job]:
        """The jobs without a group, for the next batch."""
        return [job for job in self._jobs if job.job_id not in self._found]

    @property
    def groups(self) -> list[Group]:
        """The groups, by place; all of them, once `filled` has returned true."""
        return [self._found[job.job_id] for job in self._jobs]

    def add(self, group: Group) -> None:
        """Take a group that a batch returned."""
        self._found[group.prompt_id] = group

    def filled(self, report: BatchReport | None) -> bool:
        """Return whether each place has a group, when a batch has ended; if not, replace the prompts without one.

        Raises:
            NotTrainable: there is no replacement, or replacements had no group either.
        """
        missing = self.wanted
        if not missing:
            return True
        self._rounds -= 1
        what = f"{len(missing)} of {len(self._jobs)} prompts could not be rolled out ({why_given_up(report)})"
        if self._spare is None or not self._rounds:
            names = " ".join(job.job_id for job in missing)
            raise NotTrainable(f"{what}; `prorl job JOB` shows one's way", prompts=names)
        log.warning("%s; others take their places", what)
        self._jobs = [job if job.job_id in self._found else self._spare() for job in self._jobs]
        self.replaced += len(missing)
        return False


class Outage:
    """Counts how long the service has been away; `limit_s` is the longest."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None

    def pause_s(self, error: ProrlError) -> float:
        """Return how many seconds to wait before the next try; raise the error if it was away for too long."""
        now = time.monotonic()
        self._since_s = self._since_s if self._since_s is not None else now
        if now - self._since_s > self._limit_s:
            raise error
        log.warning("%s; again in a second", error.message)
        return PAUSE_S

    def end(self) -> None:
        """Note that the service has answered."""
        self._since_s = None


class Counts:
    """Counts events for the metrics of a step; thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, what: str, number: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[what] += number

    def take_metrics(self) -> dict[str, float]:
        """Return what was counted since the last call, as `rollouts/…_total`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {f"rollouts/{name}_total": float(count) for name, count in counts.items()}


def why_given_up(report: BatchReport | None) -> str:
    """Return what the jobs of given-up groups ended with, such as `handler_failed 5 times`."""
    counts: Counter[str] = Counter()
    for group in report.given_up if report is not None else ():
        counts.update(group.failures)
    return ", ".join(f"{code} {count} times" for code, count in counts.most_common()) or "no reason was given"


def response_room(tokens: int, most: int | None, too_long: TooLong) -> int:
    """Return how many of a response's tokens are trained on: all, at most `most`, or 0 if it is dropped."""
    if most is None or tokens <= most:
        return tokens
    return max(most, 0) if too_long == "truncate" else 0


def check_too_long(too_long: str) -> None:
    """Raise `ConfigError` for another word than `drop` and `truncate`."""
    if too_long not in ("drop", "truncate"):
        raise ConfigError(f'too_long is "drop" or "truncate", not {too_long!r}', key="too_long")


def check_version(distribution: str, tested: str) -> None:
    """Warn of another minor version than the tested one.

    Raises:
        ImportError: the framework is not installed.
    """
    try:
        found = version(distribution)
    except PackageNotFoundError:
        message = f"{distribution} is not installed: pip install '{distribution}~={tested}.0'"
        raise ImportError(message) from None
    if found.split(".")[:2] != tested.split(".")[:2]:
        words = f"{distribution} {found} is installed; prorl_zmq was tested with {distribution} {tested}"
        warnings.warn(words, stacklevel=3)


def load_function(path: str) -> Any:
    """Return what `package.module.name` names.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(f"there is no {path}: {error}", key=path) from error
