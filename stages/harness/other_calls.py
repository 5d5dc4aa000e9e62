"""`OtherCalls`: a program's calls of models other than the policy, such as a user simulator's (`Job.models`).

Each model has a tree of calls and limits of its own. Its turns are not in the trajectory; the rollout's metrics have
their number (`model.NAME.turns`), and its timings their time (`model.NAME`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...errors import NoBackend
from ...model_proxy.calls import CallRefused, Model, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ...errors import ProrlError
    from ...model_proxy.calls import ModelReply, ModelRequest, OpenCall
    from ..episode import JobPolicy


class CallsModel(Model, Protocol):
    """What answers the calls of one model: a `HarnessModel`."""

    policy: JobPolicy

    @property
    def failure(self) -> ProrlError | None:
        """Why its last call failed, if it did."""

    async def finish(self, train_on: Collection[str] = ...) -> None:
        """Take no more calls."""


class OtherCalls:
    """The models of one rollout; `finish` them.

    Args:
        policy: of the rollout, with its `others`.
        make: makes what answers the calls of one of them.
    """

    def __init__(self, policy: JobPolicy, make: Callable[[JobPolicy], CallsModel]) -> None:
        self.policy = policy
        self.failure: ProrlError | None = None
        """Why the last call of another model failed, if it did."""
        self._make = make
        self._models: dict[str, CallsModel] = {}
        self._opening = asyncio.Lock()

    def takes(self, name: str) -> bool:
        """Return whether a call that asks for a model of this name is another model's."""
        others = self.policy.others
        return others is not None and others.maps(name)

    def maps(self, name: str) -> bool:
        """Return whether the job says what answers this name, be it the policy."""
        return name in self.policy.job.models

    async def open(self, request: ModelRequest) -> OtherCall:
        """Accept a call (see `model_proxy.calls.Model.open`)."""
        name = request.model
        since = time.monotonic()
        try:
            model = await self._model(name)
            call = await model.open(request)
        except NoBackend as error:
            self.failure = error
            raise CallRefused(Problem.FAILED, f"service unavailable: {error.message}") from error
        finally:
            self.policy.episode.spent(f"model.{name}", since)
        return OtherCall(self, name, model, call)

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the tokens of a prompt (see `model_proxy.calls.Model.count_tokens`)."""
        return await (await self._model(request.model)).count_tokens(request)

    async def finish(self) -> None:
        """Count the turns in the rollout's metrics."""
        metrics = self.policy.episode.metrics
        for name, model in self._models.items():
            metrics[f"model.{name}.turns"] = model.policy.episode.metrics["turns"]
            await model.finish(())

    async def _model(self, name: str) -> CallsModel:
        others = self.policy.others
        assert others is not None, "the job names it"
        async with self._opening:
            if name not in self._models:
                self._models[name] = self._make(await others.policy(name, parsed=True))
            return self._models[name]


@dataclass(slots=True)
class OtherCall:
    """Implements `model_proxy.calls.OpenCall`: a call of another model, whose time is counted in the rollout."""

    others: OtherCalls
    name: str
    model: CallsModel
    call: OpenCall

    @property
    def turn_id(self) -> str:
        """The id of the coming reply."""
        return self.call.turn_id

    @property
    def prompt_tokens(self) -> int:
        return self.call.prompt_tokens

    async def reply(self) -> ModelReply:
        """Return the model's turn (see `model_proxy.calls.OpenCall.reply`)."""
        since = time.monotonic()
        try:
            return await self.call.reply()
        finally:
            self.others.failure = self.model.failure
            self.others.policy.episode.spent(f"model.{self.name}", since)

    def close(self, *, delivered: bool) -> None:
        """Record whether the program got the whole reply."""
        self.call.close(delivered=delivered)
