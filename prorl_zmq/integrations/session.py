"""The base of all adapters: groups from the service, and the samples that a framework trains on.

`TrainerSession` collects groups, retries while the service is unavailable, and replaces prompts that cannot be rolled
out. `Sample` is a rollout's prompt and response as numpy columns.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, Self

from ..client.blocking.client import RolloutClient
from ..errors import Closed, ConfigError, NotTrainable, RequestTimeout, UnknownBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..client.blocking.batch import Batch
    from ..data.group import Group
    from ..data.rows import Row
    from ..wire.messages.batches import BatchReport
    from ..wire.messages.jobs import Job

TooLong = Literal["drop", "truncate"]

log = logging.getLogger("prorl.trainer")

ROUNDS = 3
"""How often a place is tried: with its own prompt, then with others."""
PAUSE_S = 1.0
POLL_S = 1.0
"""Longest time until `stop` takes effect."""


class TrainerSession:
    """Collects a trainer's groups over one client. For one thread, except `stop`.

    Args:
        connect: opens the client, at its first use.
        away_s: how long the service may be unavailable before an error ends the collection, in seconds.
    """

    def __init__(self, connect: Callable[[], RolloutClient] = RolloutClient, away_s: float = 0.0) -> None:
        self._connect = connect
        self._away_s = away_s
        self._client: RolloutClient | None = None
        self.stopped = threading.Event()
        """Set by `stop`."""
        self.batch: Batch | None = None
        """The last batch."""
        self.replaced = 0
        """Prompts that `fill` has replaced."""

    @property
    def report(self) -> BatchReport | None:
        """The last batch's counters so far."""
        return self.batch.report if self.batch is not None else None

    def groups(self, wanted: Callable[[], tuple[int, Iterable[Job]]], size: int, **options: Any) -> Iterator[Group]:
        """Yield the groups of a batch, and, after an outage, of further batches.

        Args:
            wanted: returns how many groups a batch needs, and its prompts; called for each batch.
            size: rollouts of a group.
            options: of `RolloutClient.open_batch`.

        Raises:
            Closed: `stop` was called.
            RequestTimeout, UnknownBatch: the service was unavailable for longer than `away_s`.
            ProrlError: as `open_batch` and `Batch.next_group`.
        """
        away_since_s: float | None = None
        self._client = self._client or self._connect()
        while not self.stopped.is_set():
            number, prompts = wanted()
            if not number:
                return
            try:
                with self._client.open_batch(number, size, **options) as self.batch:
                    away_since_s = None
                    self.batch.feed(prompts)
                    while (group := self._next(self.batch)) is not None:
                        yield group
            except (RequestTimeout, UnknownBatch) as error:
                away_since_s = away_since_s if away_since_s is not None else time.monotonic()
                if time.monotonic() - away_since_s >= self._away_s:
                    raise
                log.warning("%s; again in a second", error.message)
                self.stopped.wait(PAUSE_S)
            else:
                return
        raise Closed("the rollouts were stopped")

    def fill(
        self, jobs: Sequence[Job], size: int, spare: Callable[[], Job] | None = None, **options: Any
    ) -> list[Group]:
        """Return a group for each job, in order.

        Args:
            jobs: one for each place.
            size: rollouts of a group.
            spare: makes the job of another prompt, which replaces one that cannot be rolled out, at most twice; None:
                no prompt is replaced.
            options: of `RolloutClient.open_batch`.

        Raises:
            NotTrainable: a prompt and its replacements could not be rolled out.
            ProrlError: as `groups`.
        """
        places = list(jobs)
        found: dict[str, Group] = {}

        def missing() -> list[Job]:
            return [job for job in places if job.job_id not in found]

        for rounds_left in range(ROUNDS if spare is not None else 1)[::-1]:
            for group in self.groups(lambda: (len(missing()), missing()), size, **options):
                found[group.prompt_id] = group
            lost = missing()
            if not lost:
                break
            what = f"{len(lost)} of {len(places)} prompts could not be rolled out ({why_given_up(self.report)})"
            if spare is None or not rounds_left:
                names = " ".join(job.job_id for job in lost)
                raise NotTrainable(f"{what}; `prorl job JOB` shows one's way", prompts=names)
            log.warning("%s; others take their places", what)
            places = [job if job.job_id in found else spare() for job in places]
            self.replaced += len(lost)
        return [found[job.job_id] for job in places]

    def stop(self) -> None:
        """End the collection within a second; thread-safe."""
        self.stopped.set()

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, batch: Batch) -> Group | None:
        while not self.stopped.is_set():
            before = batch.status
            try:
                return batch.next_group(POLL_S)
            except RequestTimeout:
                if batch.status is before:
                    raise  # no reply; otherwise there is just no group yet
        raise Closed("the rollouts were stopped")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A row's prompt and response for training, the response cut to the framework's limit."""

    row: Row
    length: int
    """R: tokens of the response; 0: dropped because it is too long."""

    @classmethod
    def of(cls, row: Row, most: int | None = None, too_long: TooLong = "drop") -> Sample:
        """Make the sample of a row whose response may have `most` tokens; None: any number."""
        tokens = len(row) - row.prompt_tokens
        if most is None or tokens <= most:
            return cls(row, tokens)
        return cls(row, max(most, 0) if too_long == "truncate" else 0)

    @property
    def is_cut(self) -> bool:
        """Whether it is shorter than the rollout."""
        return self.length < len(self.row) - self.row.prompt_tokens

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The prompt's tokens, int32 [P]."""
        return self.row.arrays.token_ids[: self.row.prompt_tokens]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """The response's tokens, int32 [R]."""
        return self.row.arrays.token_ids[self._response]

    @property
    def response_mask(self) -> NDArray[np.int64]:
        """1 where the policy generated the token, else 0; int64 [R]."""
        mask: NDArray[np.int64] = self.row.arrays.loss_mask[self._response].astype("int64")
        return mask

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """The engine's log-probs, float32 [R]; 0 where the policy did not generate the token."""
        return self.row.arrays.logprobs[self._response]

    @property
    def token_rewards(self) -> NDArray[np.float32]:
        """The reward by token of the response, float32 [R]; the sum is the reward, also of a response that is cut."""
        return self.row.rewards_within(self.row.prompt_tokens + self.length)[self._response]

    @property
    def _response(self) -> slice:
        return slice(self.row.prompt_tokens, self.row.prompt_tokens + self.length)


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
        """Return the counts since the last call, as `rollouts/…_total`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {f"rollouts/{name}_total": float(count) for name, count in counts.items()}


def why_given_up(report: BatchReport | None) -> str:
    """Return the errors of given-up groups' jobs with their counts, such as `handler_failed 5 times`."""
    counts: Counter[str] = Counter()
    for group in report.given_up if report is not None else ():
        counts.update(group.failures)
    return ", ".join(f"{code} {count} times" for code, count in counts.most_common()) or "no reason was given"


def check_too_long(too_long: str) -> None:
    """Raise `ConfigError` unless `too_long` is `drop` or `truncate`."""
    if too_long not in ("drop", "truncate"):
        raise ConfigError(f'too_long is "drop" or "truncate", not {too_long!r}', key="too_long")


def check_version(distribution: str, tested: str) -> None:
    """Warn if the installed minor version is not the tested one.

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
    """Import and return `package.module.name`.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(f"there is no {path}: {error}", key=path) from error
