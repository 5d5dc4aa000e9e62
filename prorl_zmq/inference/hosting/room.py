"""`Room`: the number of rollouts that an engine takes, from what its host measures. Pure: no clock, no sockets.

An engine with more rollouts than its KV cache holds computes their prefixes again and again, and stays in that state,
since rollouts hardly end. The right number depends on the contexts and on the duration of tool calls, so feedback finds
it: b, the budget, is the multiple of the cache's capacity that the held rollouts' contexts may have together. Each
rollout is charged with its context or the mean context of ended rollouts, whichever is larger, and each new one with
the mean, since young rollouts grow. So the engine takes

    rollouts = held + (b · capacity − charged) / mean, at least `LEAST`, at most `slots`

With u the share of KV that running requests use, and a the share of prompt tokens that had been cached and were
computed again, both smoothed over `SMOOTH_S`, the first row that applies decides b, which begins with 1:

| condition | new b | settle |
|---|---|---|
| no valid report yet | no b: there is no limit | |
| this report is missing or invalid, or weights changed less than `RESUMED_S` ago | b; the report does not count | |
| the capacity changed by more than 1 % | b | yes |
| nothing is held | b | |
| b settles: more than `LEAST` were held, charged above the budget, until now or less than `SETTLED_S` ago | b | |
| a preemption | 0.8 b' | yes |
| for `PATIENCE_S`, more than half of the held rollouts wait in the engine, or a > 0.25 | 0.8 b' | yes |
| u > 0.75 | b' · 0.6 / u | yes |
| it is used up, all held rollouts were replaced, none waits, u < 0.6, and a < 0.05 | b (1 + 0.2 (1 − u / 0.6)²) | |
| else | b | |

b' is b, or what is charged if that is less, but at least b / 2. No reduction ends a rollout: the broker sends new ones
once others end. The mean is half the longest context until rollouts have ended. `bench/scheduling.py` measures the law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

TARGET, HIGH = 0.6, 0.75
"""Share of KV in use below which b may grow, and above which it is reduced. The contexts of rollouts that wait for a
tool are not in use, and need the rest."""
GROWTH, CUT = 0.2, 0.8
AGAIN_LOW, AGAIN_HIGH = 0.05, 0.25
SMOOTH_S, RESUMED_S, PATIENCE_S, SETTLED_S = 60.0, 20.0, 60.0, 120.0
LEAST = 2
PRIOR_ROLLOUTS = 10
"""The prior of the mean context counts as much as this number of ended rollouts."""
UNKNOWN_CONTEXTS = 8
"""Contexts that fit, by assumption, if the longest is unknown."""
SAME_CAPACITY = 0.01
MOST = 1e12
"""Larger numbers of a report are nonsense."""
LONGEST_BEAT_S = 15.0
"""A report stands for at most this time."""


@dataclass(frozen=True, slots=True)
class KvReport:
    """What an engine's host measured since its last report."""

    capacity_tokens: float
    used: float
    """Mean share of the capacity that running requests use."""
    preempted: float = 0.0
    """Preemptions."""
    waiting: float = 0.0
    """Requests that wait in the engine now."""
    prompt_tokens: float = 0.0
    again_tokens: float = 0.0
    """Of the prompt tokens, those that had been cached, with the present weights, and were computed again."""

    @property
    def is_valid(self) -> bool:
        counts = (self.preempted, self.waiting, self.prompt_tokens, self.again_tokens)
        return (
            1 <= self.capacity_tokens <= MOST
            and 0 <= self.used <= 1
            and all(0 <= one <= MOST for one in counts)
            and self.again_tokens <= self.prompt_tokens
        )


@dataclass(frozen=True, slots=True)
class Held:
    """What the backend broker knows of an engine's rollouts."""

    rollouts: int
    """Those that hold the engine now."""
    ended: int
    """Those that ended since the engine registered, after at least one generation."""
    known: int = 0
    """Ended rollouts of the model, on any engine, whose contexts are known."""
    mean_tokens: float = 0.0
    """The mean of these contexts at their ends."""


class Room:
    """Updated with each heartbeat; `rollouts` is then the number that the engine takes.

    Args:
        slots: the most rollouts.
        context_tokens: the longest context; 0: unknown.
    """

    def __init__(self, slots: int, context_tokens: int) -> None:
        self._slots = slots
        self._context_tokens = context_tokens
        self._capacity = 0.0
        """Of the last valid report; 0: there was none."""
        self._budget = 1.0
        """b."""
        self._charged = 0.0
        self._mean = 1.0
        self._held = 0
        self._at = math.inf
        """The time of the last update; infinite: there was none."""
        self._resumed = -math.inf
        self._used = 0.0
        self._prompt_tokens = self._again_tokens = 0.0
        self._queued_s = self._again_s = 0.0
        self._settled = -math.inf
        """When b has settled; infinite: the charge is above the budget."""
        self._ended = 0
        """`Held.ended` at the last change of b."""

    @property
    def rollouts(self) -> int | None:
        """The most rollouts that the engine takes; None: it has reported no valid KV figures yet."""
        return min(max(self._held + self._free, LEAST), self._slots) if self._capacity else None

    @property
    def used(self) -> float:
        """Smoothed share of KV that running requests use."""
        return self._used

    @property
    def again(self) -> float:
        """Smoothed share of prompt tokens that had been cached and were computed again."""
        return self._again_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    def note_weights(self, now: float) -> None:
        """Record that the engine has resumed with new weights, which cost it all cached prefixes."""
        self._resumed = now

    def update(self, report: KvReport | None, held: Held, contexts: Collection[float], now: float) -> None:
        """Apply the table above.

        Args:
            report: since the last update; None: the engine reported nothing.
            held: as last received from the broker.
            contexts: tokens of the held rollouts' contexts, as far as they are known: at most `held.rollouts`.
            now: the time in seconds, which never decreases.
        """
        elapsed, self._at = min(max(now - self._at, 0.0), LONGEST_BEAT_S), now
        if report is None or not report.is_valid:
            return
        changed = self._capacity and abs(report.capacity_tokens / self._capacity - 1) > SAME_CAPACITY
        if changed or not self._capacity:
            self._used = report.used
        self._capacity = report.capacity_tokens
        self._charge(held, contexts)
        if changed:
            self._settle(held)
        if now < self._resumed + RESUMED_S:
            return
        self._measure(report, elapsed)
        fits = held.rollouts <= LEAST or self._charged <= self._budget * self._capacity
        if self._settled == math.inf and fits:
            self._settled = now + SETTLED_S
            self._ended = held.ended
        self._ended = min(self._ended, held.ended)  # a restarted broker counts from 0
        if held.rollouts and now >= self._settled:
            self._decide(report, held)

    @property
    def _free(self) -> int:
        """Rollouts that still fit; negative: too many are held."""
        return math.floor((self._budget * self._capacity - self._charged) / self._mean)

    def _charge(self, held: Held, contexts: Collection[float]) -> None:
        prior = self._context_tokens / 2 or self._capacity / UNKNOWN_CONTEXTS
        known = held.known if held.known > 0 and 0 < held.mean_tokens < math.inf else 0
        total = PRIOR_ROLLOUTS * prior + (known * held.mean_tokens if known else 0.0)
        self._mean = mean = total / (PRIOR_ROLLOUTS + known)
        self._held = held.rollouts
        self._charged = sum(max(one, mean) for one in contexts) + mean * max(0, held.rollouts - len(contexts))

    def _measure(self, report: KvReport, elapsed: float) -> None:
        keep = math.exp(-elapsed / SMOOTH_S)
        self._used = min(1.0, keep * self._used + (1 - keep) * report.used)
        self._prompt_tokens = keep * self._prompt_tokens + report.prompt_tokens
        self._again_tokens = keep * self._again_tokens + report.again_tokens
        self._queued_s = self._queued_s + elapsed if report.waiting > self._held / 2 else 0.0
        self._again_s = self._again_s + elapsed if self.again > AGAIN_HIGH else 0.0

    def _decide(self, report: KvReport, held: Held) -> None:
        if report.preempted or max(self._queued_s, self._again_s) >= PATIENCE_S:
            self._reduce(CUT, held)
        elif self._used > HIGH:
            self._reduce(TARGET / self._used, held)
        elif (
            self._free <= 0
            and held.ended - self._ended >= held.rollouts
            and not report.waiting
            and self._used < TARGET
            and self.again < AGAIN_LOW
        ):
            self._budget *= 1 + GROWTH * (1 - self._used / TARGET) ** 2
            self._ended = held.ended

    def _reduce(self, factor: float, held: Held) -> None:
        taken = max(min(self._budget, self._charged / self._capacity), self._budget / 2)
        self._budget = max(factor * taken, LEAST * self._mean / self._capacity)
        self._settle(held)

    def _settle(self, held: Held) -> None:
        self._settled = math.inf
        self._ended = held.ended
        self._queued_s = self._again_s = 0.0
