"""`TaskTrial`: one rollout of a task, phase by phase, in a `LocalService` (`prorl tasks try`).

A handler that blocks the loop is noticed by its silence; the end of the service names its line.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RequestTimeout
from ..wire.messages.jobs import Phase, PhaseLimits
from .local_service import LocalService, NotStopped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from ..data.trajectory import Trajectory
    from ..inference.engine import Engine
    from ..stages.handler import AgentHandler
    from ..wire.messages.backends import Backend
    from ..wire.messages.jobs import Job

PHASES = len(Phase)
BACKEND_WAIT_S = 5.0
"""Longest wait for a backend: those of a trial are there from its start."""
SLACK_S = 5.0
"""How much later than its limit a phase must have ended, unless its handler blocks the loop."""


@dataclass(frozen=True, slots=True)
class PhaseSeen:
    """How a phase ended."""

    phase: Phase
    took_s: float
    returned: Any = None
    """What the handler returned."""
    raised: BaseException | None = None


@dataclass(frozen=True, slots=True)
class TaskTrial:
    """A rollout to be tried.

    Args:
        job: the job; its limits and attempts are the trial's.
        handlers: the tasks that are served.
        engine: what talks; see `LocalService`.
        models: the engines of other models, by name.
        sandbox: what the tools act in.
        image: the sandbox's root filesystem; empty: the kind's own.
        limit_s: longest time of each phase.
        start_limit_s: longest time until the engine is ready.
    """

    job: Job
    handlers: Mapping[str, type[AgentHandler[Any]]]
    engine: Engine | Callable[[], Awaitable[Engine]]
    models: Mapping[str, Engine]
    sandbox: str
    image: str
    limit_s: float
    start_limit_s: float

    def run(self, on_phase: Callable[[PhaseSeen], None]) -> tuple[Trajectory, tuple[Backend, ...]]:
        """Run the rollout; return its trajectory and what has served it.

        Raises:
            ConfigError: the sandbox, the engine or a handler cannot be used.
            InvalidJob: the instance does not fit.
            RequestTimeout: a handler blocks the loop; the message says where it is.
        """
        return asyncio.run(self._run(on_phase))

    async def _run(self, on_phase: Callable[[PhaseSeen], None]) -> tuple[Trajectory, tuple[Backend, ...]]:
        loop, seen = asyncio.get_running_loop(), asyncio.Queue[PhaseSeen | None]()

        def note(phase: PhaseSeen | None) -> None:
            loop.call_soon_threadsafe(seen.put_nowait, phase)

        limits = PhaseLimits(self.limit_s, self.limit_s, self.limit_s)
        job = msgspec.structs.replace(self.job, limits=limits, max_attempts=1, backend_wait_s=BACKEND_WAIT_S)
        service = LocalService(
            handlers={task: _watched(kind, note) for task, kind in self.handlers.items()},
            engine=self.engine,
            models=self.models,
            sandbox=self.sandbox,
            slots=1,
            topology={"sandbox": {"image": self.image}} if self.image else None,
            start_limit_s=self.start_limit_s,
        )
        try:
            return await self._with_service(service, job, seen, on_phase)
        except RequestTimeout as error:
            where = "; ".join(getattr(error, "__notes__", ()))
            raise RequestTimeout(f"{error.message}: {where}", timeout_s=self.limit_s) if where else error from None
        except NotStopped as error:  # the job was given up before the limit, as a service gives up a silent process
            raise RequestTimeout(f"a phase blocks the event loop: {error}", timeout_s=self.limit_s) from None

    async def _with_service(
        self,
        service: LocalService,
        job: Job,
        seen: asyncio.Queue[PhaseSeen | None],
        on_phase: Callable[[PhaseSeen], None],
    ) -> tuple[Trajectory, tuple[Backend, ...]]:
        with service:
            async with service.async_client() as client:
                await client.submit(job)
                collecting = asyncio.ensure_future(client.collect(1, wait_s=PHASES * (self.limit_s + SLACK_S)))
                async for phase in _until_ended(seen, collecting, self.limit_s + SLACK_S):
                    on_phase(phase)
                if not collecting.done():
                    collecting.cancel()
                    raise RequestTimeout(
                        f"a phase is still running {SLACK_S:g} s after its limit of {self.limit_s:g} s",
                        timeout_s=self.limit_s,
                    )
                (trajectory,) = collecting.result()
                return trajectory, tuple(status.backend for status in await client.backends.list())


async def _until_ended(
    seen: asyncio.Queue[PhaseSeen | None], collecting: asyncio.Future[Any], silence_s: float
) -> AsyncIterator[PhaseSeen]:
    """Yield phases as they end, until the job has ended, or nothing has happened for so long."""
    while True:
        getting = asyncio.ensure_future(seen.get())
        await asyncio.wait({getting, collecting}, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            return
        if (phase := getting.result()) is not None:
            yield phase


def _watched(kind: type[AgentHandler[Any]], note: Callable[[PhaseSeen | None], None]) -> type[AgentHandler[Any]]:
    """Return a subclass whose phases are noted when they begin (None) and end."""

    async def noted(phase: Phase, work: Awaitable[Any]) -> Any:
        note(None)
        began = time.monotonic()
        try:
            returned = await work
        except BaseException as error:
            note(PhaseSeen(phase, time.monotonic() - began, raised=error))
            raise
        note(PhaseSeen(phase, time.monotonic() - began, returned))
        return returned

    class Watched(kind):  # type: ignore[misc, valid-type]
        async def init(self, phase: Any) -> Any:
            return await noted(Phase.INIT, super().init(phase))

        async def run(self, phase: Any) -> Any:
            return await noted(Phase.RUN, super().run(phase))

        async def eval(self, phase: Any) -> Any:
            return await noted(Phase.EVAL, super().eval(phase))

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched
