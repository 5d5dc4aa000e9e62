"""`EngineStarts`: which engines of this node are starting, ready or failed. Pure.

    starting   listed by the backend broker                      ready
    starting   ended; never ready before, fewer than MAX_STARTS  starting, after a pause
    starting   ended; never ready before, MAX_STARTS reached     failed; not restarted
    starting   ended; it was ready once                          starting; from MAX_STARTS on reported as failed
    ready      ended                                             starting

The backend broker lists a killed engine until its lease expires. So a listing counts for the new process only if the
engine was missing from a list since that process started, or if the lease has passed since then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..system.logs import one_line
from ..wire.messages.backends import EngineStart
from ..wire.messages.base import POLICY

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ..wire.messages.backends import BackendList

MAX_STARTS = 3
"""Starts of an engine that was never ready."""
PROBLEM_LENGTH = 900
"""Most characters of a reason, as in `EngineStart`."""


@dataclass(slots=True)
class _Engine:
    is_ready: bool = False
    was_ready: bool = False
    starts: int = 0
    """Since it was last ready."""
    started: float = 0.0
    was_missing: bool = False
    """A list of backends did not have it since its process started."""
    problem: str = ""
    """Why it ended."""
    failed: bool = False
    model: str = POLICY
    """The model that it serves."""


class EngineStarts:
    """The engines that this node starts: the model that each serves, by its name."""

    def __init__(self, engines: Mapping[str, str], lease_s: float) -> None:
        self._engines = {name: _Engine(model=model) for name, model in engines.items()}
        self._lease_s = lease_s

    def __contains__(self, name: str) -> bool:
        return name in self._engines

    def forget(self) -> None:
        """Drop all engines: the node is exiting."""
        self._engines.clear()

    def started(self, name: str, now: float) -> None:
        """Record that a process of the engine is about to start."""
        engine = self._engines[name]
        engine.is_ready = engine.was_missing = False
        engine.starts += 1
        engine.started = now

    def ended(self, name: str, problem: str) -> bool:
        """Record that its process ended, or could not be started; return whether to restart it."""
        engine = self._engines[name]
        engine.problem = one_line(problem, PROBLEM_LENGTH)
        engine.is_ready = False
        engine.failed = engine.starts >= MAX_STARTS
        return engine.was_ready or not engine.failed

    def listed(self, backend_ids: Collection[str], now: float) -> None:
        """Record the backend broker's current list of backends."""
        for name, engine in self._engines.items():
            if name not in backend_ids:
                engine.was_missing = True
            elif engine.starts and (engine.was_missing or now - engine.started > self._lease_s):
                engine.is_ready = engine.was_ready = True
                engine.starts, engine.problem, engine.failed = 0, "", False

    def is_ready(self, name: str) -> bool:
        return self._engines[name].is_ready

    def failed(self) -> dict[str, str]:
        """Return the failed engines with their reasons."""
        return {name: engine.problem for name, engine in self._engines.items() if engine.failed}

    def all_failed(self) -> bool:
        return bool(self._engines) and all(engine.failed for engine in self._engines.values())

    def report(self) -> tuple[EngineStart, ...]:
        """Return the engines that are not ready, for the backend broker."""
        return tuple(
            EngineStart(name, "failed" if engine.failed else "starting", engine.problem, engine.model)
            for name, engine in self._engines.items()
            if not engine.is_ready
        )


def no_engine_left(listed: BackendList) -> str:
    """Return why a service has no backend and will start none; empty: it has one, or one is starting."""
    if listed.backends or not listed.starts or any(start.state == "starting" for start in listed.starts):
        return ""
    return "; ".join(f"{start.backend_id} {start.problem}" for start in listed.starts)
