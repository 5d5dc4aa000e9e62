"""`EngineFigures`: what an engine's host counts and measures for its heartbeats. No clock and no sockets.

Of an engine that reports on its KV cache, it also decides how many rollouts the engine takes (`room`, `job_traffic`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import numpy as np

from ...metrics import catalog
from ...system.used_memory import used_memory
from ...wire.messages.backends import EngineLoad
from .job_traffic import JobTraffic
from .parking import Parking
from .room import Held, KvReport, Room

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...wire.messages.backends import Backend, BackendHeld
    from ..engine import Engine, Generation, KvEngine

SILENT_S = 60.0
"""Time without valid figures of the KV cache after which the host logs a warning, and waits for the first no more."""

log = logging.getLogger("prorl.engine")


class EngineFigures:
    """The figures of one engine.

    Args:
        engine: the engine.
        backend: its registration.
        now: the time in seconds, of `time.monotonic`, as in all calls.
    """

    def __init__(self, engine: Engine, backend: Backend, now: float) -> None:
        self._kv = cast("KvEngine", engine) if engine.description.kv else None
        self._backend_id = backend.backend_id
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._reported = (now, 0)
        """The time of the last heartbeat, and the tokens generated until then."""
        self._room = Room(backend.max_in_flight, backend.context_tokens)
        self.parking = Parking[str]() if self._kv is not None else None
        """Decides which turns wait; None: the engine reports nothing of its KV cache."""
        self._traffic = JobTraffic()
        self._held = Held(0, 0)
        self._last: KvReport | None = None
        """The last valid report."""
        self._started = self._valid_at = now
        self._awaited = False
        """Whether the first figures may still come."""
        self._slots = backend.max_in_flight
        self._seen = (0, 0)
        """The traffic's sums at the last report."""
        self._preempted = 0

    @property
    def room(self) -> int | None:
        """The most rollouts that the engine takes: its slots until the first figures; None: there are no figures."""
        room = self._room.rollouts
        return self._slots if room is None and self._awaited else room

    def note_turn(self, job_id: str, prompt: NDArray[np.int32], done: Generation, now: float) -> int:
        """Count a generation that has ended; return the prompt's tokens that had been cached and were computed again.

        Args:
            job_id: its job.
            prompt: int32 [P], contiguous.
            done: the generation, with plain arrays (`engine.as_plain`).
            now: the time.
        """
        self._prompt_tokens += len(prompt)
        self._cached_tokens += done.cached_tokens
        self._generated_tokens += len(done.token_ids)
        counts = {"prompt": len(prompt), "cached": done.cached_tokens, "generated": len(done.token_ids)}
        for kind, tokens in counts.items():
            catalog.ENGINE_TOKENS.add(self._backend_id, kind, amount=tokens)
        if self._kv is None:
            return 0
        generated = np.ascontiguousarray(done.token_ids)
        again = self._traffic.note_turn(job_id, prompt, generated, done.cached_tokens, now)
        return again if self._cached_tokens else 0

    def note_held(self, held: BackendHeld) -> None:
        """Record what the backend broker says of the engine's rollouts."""
        self._held = Held(held.rollouts, held.ended, held.known, held.mean_tokens)

    def note_weights(self, now: float) -> None:
        """Record that the engine has new weights, and has dropped all cached prefixes."""
        self._traffic.note_weights()
        self._room.note_weights(now)

    def measure(self, now: float, *, updating: bool = False) -> list[str]:
        """Read the state of the engine's KV cache, and update `room` and `parking`; call it before each heartbeat.

        Return the parked turns that may continue.

        Args:
            now: the time.
            updating: whether the engine pauses for new weights: then its figures do not count.
        """
        if self._kv is None or self.parking is None:
            return []
        report = self._report(now)
        self._awaited = now <= self._started + SILENT_S
        self._traffic.keep_latest(self._held.rollouts)
        if report is None:
            if self._valid_at + SILENT_S < now:
                log.warning("the engine has reported no valid figures of its KV cache for %g s", now - self._valid_at)
                self._valid_at = now
            return self.parking.update(None, self._held.rollouts, now)
        self._valid_at = now
        self._last = report
        self._preempted += int(report.preempted)
        catalog.ENGINE_PREEMPTIONS.add(self._backend_id, amount=int(report.preempted))
        catalog.ENGINE_TOKENS.add(self._backend_id, "again", amount=int(report.again_tokens))
        if not updating:
            self._room.update(report, self._held, self._traffic.contexts(now), now)
        return self.parking.update(None if updating else report, self._held.rollouts, now)

    def set_gauges(self) -> None:
        if self._last is not None:
            catalog.ENGINE_QUEUED.set(self._last.waiting, self._backend_id)
            catalog.ENGINE_KV_USED.set(self._room.used, self._backend_id)
            catalog.ENGINE_PARKED.set(len(self.parking or ()), self._backend_id)

    def load(self, running: int, now: float, *, lacks_events: bool = False) -> EngineLoad:
        """Return the report of a heartbeat.

        Args:
            running: running generations.
            now: the time.
            lacks_events: as in `EngineLoad`.
        """
        then, generated = self._reported
        self._reported = (now, self._generated_tokens)
        return EngineLoad(
            running=running,
            tokens_per_s=(self._generated_tokens - generated) / max(now - then, 1e-3),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            memory_bytes=used_memory(),
            kv_tokens=int(self._last.capacity_tokens) if self._last is not None else 0,
            kv_used=self._room.used,
            queued=int(self._last.waiting) if self._last is not None else 0,
            preempted=self._preempted,
            again_tokens=self._again_tokens,
            parked=len(self.parking) if self.parking is not None else 0,
            lacks_events=lacks_events,
        )

    @property
    def _again_tokens(self) -> int:
        """Prompt tokens computed again; 0 as long as no answer names cached tokens: the engine may never do so."""
        return self._traffic.again_tokens if self._cached_tokens else 0

    def _report(self, now: float) -> KvReport | None:
        """Return what the engine reports of its KV cache; None: nothing new, or nothing valid."""
        assert self._kv is not None
        try:
            figures = self._kv.kv_figures(now)
            if figures is None:
                return None
            prompt, again = self._traffic.prompt_tokens, self._again_tokens
            report = KvReport(
                capacity_tokens=float(figures.capacity_tokens),
                used=float(figures.used),
                preempted=float(figures.preempted),
                waiting=float(figures.waiting),
                prompt_tokens=prompt - self._seen[0],
                again_tokens=again - self._seen[1],
            )
        except Exception:
            log.debug("the engine's figures of its KV cache are unusable", exc_info=True)
            return None  # an engine may be of another package
        if not report.is_valid:
            return None
        self._seen = (prompt, again)
        return report
