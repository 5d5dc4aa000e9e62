"""`ServiceViews`: looks at jobs and batches from near, at whichever rollout broker of the service has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...service.rollout_brokers import ask_all, fates, the_answer, trace_in
from ...watching.training import trainings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...client.asynchronous.client import AsyncRolloutClient
    from ...data.trajectory import TokenArrays, Trajectory
    from ...watching.training import Training
    from ...wire.messages.front_door import JobTrace
    from ...wire.messages.jobs import Result
    from ...wire.messages.watching import BatchView, TurnsPeeked


class ServiceViews:
    def __init__(self, clients: Mapping[str, AsyncRolloutClient]) -> None:
        self._clients = clients
        self.brokers = frozenset(clients)
        """Their names."""

    async def trace(self, job_id: str) -> JobTrace:
        return trace_in(await ask_all(self._clients, lambda client: client.trace(job_id)), job_id)

    async def peek(self, job_id: str) -> tuple[Result, Trajectory | None]:
        return the_answer(await ask_all(self._clients, lambda client: client.views.peek(job_id)))

    async def turns(self, job_id: str, known_attempt: int, known_tokens: int) -> tuple[TurnsPeeked, TokenArrays | None]:
        return the_answer(
            await ask_all(
                self._clients,
                lambda client: client.views.turns(job_id, known_attempt=known_attempt, known_tokens=known_tokens),
            )
        )

    async def batch(self, batch_id: str) -> BatchView:
        return the_answer(await ask_all(self._clients, lambda client: client.views.batch(batch_id)))

    async def trainings(self, last: int) -> list[Training]:
        """Return the last steps of each session that had batches."""
        answers = await ask_all(self._clients, lambda client: client.views.steps())
        answers.check()
        return [replace(one, steps=one.steps[-last:]) for one in trainings(answers.found)]

    async def cancel(self, job_id: str) -> dict[str, str]:
        answers = await ask_all(self._clients, lambda client: client.cancel(job_id))
        told = fates(answers.found.values())
        answers.check(every=set(told.values()) == {"unknown"})  # one that has not answered may have it
        return told
