"""`EnvironmentPool`: the workers of a stage process, and the rollouts that they play.

A worker is forked from its environment's template at first use, and a further one only when the slots of all are taken,
up to the number of CPUs; a rollout goes to the least busy one. An idle worker ends after `idle_s`, and a template
`idle_s` after its last worker. If a worker dies or hangs, its rollouts fail
with `EnvironmentFailed`. Those that may be the cause have a worker of their own when they are tried again in this
process, and so cost no other rollout a second attempt.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...errors import EnvironmentFailed
from .environment_template import EnvironmentTemplate
from .environment_worker import EnvironmentWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from .environment_template import EnvironmentPlace

T = TypeVar("T")
IDLE_S = 300.0
SUSPECTS = 1024
"""Most rollouts that are remembered since their worker died."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Opening(msgspec.Struct, frozen=True):
    """See `adapter.Opening`."""

    observations: dict[str, str | list[Message]]
    tools: list[dict[str, Any]]


class Step(msgspec.Struct, frozen=True):
    """See `adapter.Step`."""

    observations: dict[str, str | list[Message]] = {}
    rewards: dict[str, float] = {}
    done: bool = False
    truncated: bool = False
    info: dict[str, float | str] = {}
    mask: str = ""


class ProgramOutcome(msgspec.Struct, frozen=True):
    """See `adapter.Outcome`."""

    reward: float = 0.0
    rewards: dict[str, float] = {}
    turn_rewards: list[tuple[int, float]] = []
    metrics: dict[str, float] = {}
    error: str = ""
    mask: str = ""


class EnvironmentRollout:
    """One rollout on a worker. All methods raise `EnvironmentFailed`."""

    def __init__(self, worker: EnvironmentWorker, name: str) -> None:
        self.is_program = worker.hello.is_program
        """Whether it calls the model itself: `run` plays it."""
        self.is_closed = False
        self._worker, self._name = worker, name

    async def open(self, args: dict[str, Any], seed: int | None) -> Opening:
        return await self._call(Opening, "open", args=args, seed=seed)

    async def step(self, player: str, text: str) -> Step:
        return await self._call(Step, "step", player=player, text=text)

    async def call(self, player: str, tool: str, arguments: dict[str, Any]) -> Step:
        return await self._call(Step, "call", player=player, name=tool, arguments=arguments)

    async def close(self) -> Step:
        self.is_closed = True
        return await self._call(Step, "close")

    async def run(
        self, url: str, key: str, models: Sequence[str], args: dict[str, Any], seed: int | None
    ) -> ProgramOutcome:
        outcome = await self._call(ProgramOutcome, "run", url=url, key=key, models=models, args=args, seed=seed)
        self.is_closed = True
        if outcome.error:
            raise self._failed("raised", outcome.error)
        if outcome.mask:
            raise self._failed("masked", f"asks for another try: {outcome.mask}")
        return outcome

    async def _call(self, kind: type[T], do: str, **arguments: Any) -> T:
        value = await self._worker.call(do, self._name, **arguments)
        try:
            answer = msgspec.json.decode(value, type=kind)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise self._failed("raised", f"the answer to {do} is none: {error}") from error
        if isinstance(answer, Step) and answer.mask:
            raise self._failed("masked", f"asks for another try: {answer.mask}")
        return answer

    def _failed(self, reason: str, how: str) -> EnvironmentFailed:
        name = self._worker.place.name
        return EnvironmentFailed(f"the environment {name}: {how}", environment=name, reason=reason)


class EnvironmentPool:
    """Plays rollouts of any environments; `close` it.

    Args:
        processes: most workers of one environment; 0: as many as CPUs.
        idle_s: seconds after which a worker without rollouts ends.
    """

    def __init__(self, processes: int = 0, idle_s: float = IDLE_S) -> None:
        self.workers: list[EnvironmentWorker] = []
        self._processes = processes or len(os.sched_getaffinity(0))
        self._idle_s = idle_s
        self._templates: dict[EnvironmentPlace, EnvironmentTemplate] = {}
        self._importing: dict[EnvironmentPlace, asyncio.Lock] = {}
        self._starting: dict[EnvironmentPlace, asyncio.Task[None]] = {}
        self._suspects: OrderedDict[str, None] = OrderedDict()
        self._lone = asyncio.Semaphore(self._processes)
        """Bounds the rollouts that have a worker of their own."""
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._ending_idle: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def rollout(self, place: EnvironmentPlace, name: str) -> AsyncIterator[EnvironmentRollout]:
        """Have a slot of a worker for a rollout; a rollout that is left open is cancelled.

        Args:
            place: its environment.
            name: what identifies the rollout, also in further tries of it.

        Raises:
            EnvironmentFailed: no worker could be started.
        """
        if name in self._suspects:
            async with self._lone:
                worker = await self._started(place)
                worker.retiring = True
                async with self._seated(worker, name) as rollout:
                    yield rollout
                self._suspects.pop(name, None)
        else:
            async with self._seated(await self._least_busy(place), name) as rollout:
                yield rollout

    async def close(self) -> None:
        """End all workers."""
        if self._ending_idle is not None:
            self._ending_idle.cancel()
        for starting in self._starting.values():
            starting.cancel()
        await asyncio.gather(*(worker.end() for worker in self.workers))
        if ending := [*self._background, *self._starting.values()]:
            await asyncio.wait(ending)
        await asyncio.gather(*(template.end() for template in self._templates.values()))

    @asynccontextmanager
    async def _seated(self, worker: EnvironmentWorker, name: str) -> AsyncIterator[EnvironmentRollout]:
        seat = f"{name}#{time.monotonic_ns()}"  # a further try may begin while this one is being cancelled
        worker.rollouts.add(seat)
        rollout = EnvironmentRollout(worker, seat)
        try:
            yield rollout
        finally:
            if rollout.is_closed or worker.failure is not None:
                self._free(worker, seat)
            else:
                self._in_background(self._cancel(worker, seat))

    async def _cancel(self, worker: EnvironmentWorker, seat: str) -> None:
        with suppress(EnvironmentFailed):
            if not msgspec.json.decode(await worker.call("cancel", seat), type=bool):
                worker.retiring = True  # what ignores its end would stay in the process
        self._free(worker, seat)

    def _free(self, worker: EnvironmentWorker, seat: str) -> None:
        worker.rollouts.discard(seat)
        worker.idle_since = time.monotonic()
        if worker.retiring and not worker.rollouts and worker.failure is None:
            self._in_background(worker.end())
        self._changed.set()

    async def _least_busy(self, place: EnvironmentPlace) -> EnvironmentWorker:
        while True:
            own = [worker for worker in self.workers if worker.place == place and not worker.retiring]
            if free := [worker for worker in own if worker.free > 0]:
                return min(free, key=lambda worker: len(worker.rollouts))
            if starting := self._starting.get(place):
                await asyncio.shield(starting)
            elif len(own) < self._processes:
                self._starting[place] = asyncio.create_task(self._start(place))
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _start(self, place: EnvironmentPlace) -> None:
        try:
            await self._started(place)
        finally:
            del self._starting[place]

    async def _started(self, place: EnvironmentPlace) -> EnvironmentWorker:
        worker = EnvironmentWorker(await self._template(place), self._lose)
        try:
            await worker.start()
        except BaseException:
            worker.fail("cancelled", "was not ready when its start was given up")
            self._in_background(worker.end())
            raise
        self.workers.append(worker)
        if self._ending_idle is None:
            self._ending_idle = asyncio.create_task(self._end_idle())
        return worker

    async def _template(self, place: EnvironmentPlace) -> EnvironmentTemplate:
        """Return a template that can fork a worker; the caller orders one at once."""
        async with self._importing.setdefault(place, asyncio.Lock()):
            template = self._templates.get(place)
            if template is None or template.is_spent:
                template = EnvironmentTemplate(place)
                try:
                    await template.start()
                except BaseException:
                    self._in_background(template.end())
                    raise
                self._templates[place] = template
            return template

    def _lose(self, worker: EnvironmentWorker, suspects: list[str]) -> None:
        with suppress(ValueError):
            self.workers.remove(worker)
            self._in_background(worker.end())
        for seat in suspects:
            self._suspects[seat.rpartition("#")[0]] = None
        while len(self._suspects) > SUSPECTS:
            self._suspects.popitem(last=False)
        self._changed.set()

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(self._idle_s / 4)
            now = time.monotonic()
            for worker in [*self.workers]:
                if not worker.rollouts and now - worker.idle_since > self._idle_s:
                    worker.retiring = True
                    self._in_background(worker.end())
            for place, template in [*self._templates.items()]:
                if not template.is_busy and now - template.idle_since > self._idle_s:
                    del self._templates[place]
                    self._in_background(template.end())

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
