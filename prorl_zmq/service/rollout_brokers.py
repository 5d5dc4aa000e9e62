"""Queries all rollout brokers of a service at once; reports each broker that does not answer.

`RolloutBrokers` is for commands, `EachBroker` for commands without an event loop, `ask_all` for programs with one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

import msgspec

from ..errors import ProrlError, RequestTimeout, UnknownBatch, UnknownJob
from ..wire.messages.front_door import ServiceStatus, StageStatus
from .node_rows import total

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from pathlib import Path

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..client.blocking.client import RolloutClient
    from ..wire.messages.front_door import JobTrace

T = TypeVar("T")
Broker = TypeVar("Broker")
FATES = ("unknown", "finished", "cancelled")
"""What a broker reports of a job to be cancelled, the least informative first."""


class Answers(NamedTuple, Generic[T]):
    """The answers of the brokers, by name."""

    found: dict[str, T]
    problems: dict[str, ProrlError]
    """The errors of the other brokers."""

    def check(self, *, every: bool = False) -> None:
        """Raise a broker's error if none answered; with `every`, if any did not."""
        if self.problems and (every or not self.found):
            raise next(iter(self.problems.values()))

    def silent(self) -> list[str]:
        """Return a line for each broker that did not answer."""
        return [f"{name} does not answer: {error.message}" for name, error in self.problems.items()]


class RolloutBrokers:
    """Clients of all rollout brokers of a service, in a thread without an event loop."""

    def __init__(self, clients: Mapping[str, AsyncRolloutClient]) -> None:
        import asyncio  # later: `prorl status` does not need it

        self._clients = clients
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        import asyncio

        async def close() -> None:
            await asyncio.gather(*(client.close() for client in self._clients.values()))

        with self._runner:
            self._runner.run(close())

    def ask(self, question: Callable[[AsyncRolloutClient], Awaitable[T]], only: str = "") -> Answers[T]:
        """Query all at the same time, or only one, each within its client's `timeout_s`."""
        clients = {only: self._clients[only]} if only else self._clients
        return self._runner.run(ask_all(clients, question))

    def trace(self, job_id: str) -> JobTrace:
        """Return a job's history; see `trace_in`."""
        return trace_in(self.ask(lambda client: client.trace(job_id)), job_id)


class EachBroker:
    """Clients of all rollout brokers of a service, queried in one thread each."""

    def __init__(self, clients: Mapping[str, RolloutClient]) -> None:
        self._clients = clients

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def ask(self, question: Callable[[RolloutClient], T], only: str = "") -> Answers[T]:
        """Query all at the same time, or only one, each within its client's `timeout_s`."""
        clients = {only: self._clients[only]} if only else self._clients

        def one(client: RolloutClient) -> T | ProrlError:
            try:
                return question(client)
            except ProrlError as error:
                return error

        with ThreadPoolExecutor(len(clients)) as pool:
            return _answers(dict(zip(clients, pool.map(one, clients.values()), strict=True)))


def the_answer(answers: Answers[T]) -> T:
    """Return the answer of the broker that has the requested item, or raise the most informative error."""
    if answers.found:
        return next(iter(answers.found.values()))
    raise min(
        answers.problems.values(),
        key=lambda error: isinstance(error, UnknownJob | UnknownBatch) and not error.fields.get("ended"),
    )


async def ask_all(brokers: Mapping[str, Broker], question: Callable[[Broker], Awaitable[T]]) -> Answers[T]:
    """Query all at the same time; each has its own time limit."""
    import asyncio

    async def one(broker: Broker) -> T | ProrlError:
        try:
            return await question(broker)
        except ProrlError as error:
            return error

    return _answers(dict(zip(brokers, await asyncio.gather(*map(one, brokers.values())), strict=True)))


def _answers(told: Mapping[str, T | ProrlError]) -> Answers[T]:
    problems = {name: answer for name, answer in told.items() if isinstance(answer, ProrlError)}
    return Answers({name: answer for name, answer in told.items() if not isinstance(answer, ProrlError)}, problems)


def trace_in(answers: Answers[JobTrace], job_id: str) -> JobTrace:
    """Return a job's history from the broker that has it.

    Raises:
        UnknownJob: no job has this id or prefix, or several have.
        RequestTimeout: a broker that did not answer may have it.
    """
    for error in answers.problems.values():
        if isinstance(error, UnknownJob) and not error.fields.get("matches"):
            continue
        if isinstance(error, RequestTimeout) and answers.found:
            continue
        raise error
    if len(answers.found) > 1:
        known = ", ".join(f"{trace.job_id} ({name})" for name, trace in answers.found.items())
        raise UnknownJob(f"several jobs begin with {job_id}: {known}", job_id=job_id, matches=len(answers.found))
    answers.check()
    return next(iter(answers.found.values()))


def clients_of(path: Path, timeout_s: float, keys: Path | None = None) -> dict[str, AsyncRolloutClient]:
    """Return a client of each rollout broker of a service's folder, by name; it finds a broker again after a move."""
    from ..client.asynchronous.client import AsyncRolloutClient

    return {
        name: AsyncRolloutClient(service=path, session=session, timeout_s=timeout_s, keys=keys)
        for name, session in sessions_of(path).items()
    }


def sessions_of(path: Path) -> dict[str, str]:
    """Return a session of each rollout broker of a service's folder, by the broker's name."""
    from .service_folder import ServiceFolder  # later: a service with one broker has none

    folder = ServiceFolder.open(path)
    return {name: folder.session_of(name) for name in folder.rollout_brokers}


def summed(statuses: Iterable[ServiceStatus]) -> ServiceStatus:
    """Return the sum of brokers' statuses: a node's stages once, with the slots that each broker has of them."""
    parts = list(statuses)
    stages: dict[str, StageStatus] = {}
    for each in (stage for part in parts for stage in part.stages):
        before = stages.get(each.stage_id)
        slots, busy = (before.slots, before.busy) if before is not None else (0, 0)
        stages[each.stage_id] = msgspec.structs.replace(each, slots=slots + each.slots, busy=busy + each.busy)
    return ServiceStatus(
        parts[0].request_id,
        stages=tuple(stages.values()),
        queued=total(part.queued for part in parts),
        running=total(part.running for part in parts),
        outcomes=total(part.outcomes for part in parts),
        uncollected=sum(part.uncollected for part in parts),
        redelivered=sum(part.redelivered for part in parts),
        lost_blocks=sum(part.lost_blocks for part in parts),
        tasks=tuple(sorted({task for part in parts for task in part.tasks})),
        batches=tuple(batch for part in parts for batch in part.batches),
        uptime_s=min(part.uptime_s for part in parts),
    )


def fates(answers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the fate of each job that was to be cancelled, merged from all brokers."""
    known: dict[str, str] = {}
    for each in answers:
        for job_id, fate in each.items():
            known[job_id] = max(known.get(job_id, fate), fate, key=FATES.index)
    return known
