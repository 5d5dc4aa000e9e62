"""`OtherModels`: the models that a job talks to besides the policy, by the task's names for them (`Job.models`).

The policy is the job's `model`. A name that the job does not map is a model's name itself; `policy` is the policy. A
model is a group of the service's backends, one of which the job holds as it holds the policy's, or an endpoint of the
environment (see `chat_endpoint`), which comes first.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ..errors import EngineFailed, InvalidJob
from ..inference.chat.loading import chat_format
from ..wire.messages.base import POLICY, endpoint_variables
from ..wire.messages.jobs import NamedModel
from .chat_endpoint import RETRY_S, TRY_S, ChatEndpoint, endpoints
from .endpoint_chat import EndpointChat
from .episode import UNLIMITED, Episode, JobPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..inference.engine import Generation
    from ..wire.messages.jobs import Job, Sampling
    from .job_backend import JobBackend


class ChatEndpoints:
    """The endpoints of a stage process's environment; `close` them."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, *, try_s: float = TRY_S, retry_s: float = RETRY_S
    ) -> None:
        self._environment, self._try_s, self._retry_s = environment, try_s, retry_s
        self._open: dict[str, ChatEndpoint] = {}

    def find(self, model: str) -> ChatEndpoint | None:
        """Return a model's endpoint; None: the environment has none of this name."""
        prefix = endpoint_variables(model)
        if prefix == endpoint_variables(POLICY) or not self._environment.get(f"{prefix}_URL", "").strip():
            return None
        if prefix not in self._open:
            self._open[prefix] = ChatEndpoint(model, self._environment, try_s=self._try_s, retry_s=self._retry_s)
        return self._open[prefix]

    def names(self) -> tuple[str, ...]:
        return endpoints(self._environment)

    async def close(self) -> None:
        """Close the connections; may be called again."""
        opened, self._open = self._open, {}
        for endpoint in opened.values():
            await endpoint.close()


@dataclass(slots=True)
class OtherModels:
    """The models of one attempt of a job; `release` them.

    Args:
        job: its `models` count.
        endpoints: those of the process.
        backend: makes the job's backend of a model.
    """

    job: Job
    endpoints: ChatEndpoints
    backend: Callable[[str], JobBackend]
    _held: dict[str, _Held] = field(default_factory=dict)

    def named(self, role: str) -> NamedModel:
        """Return the model for a task's or a program's name of it."""
        return NamedModel.of(self.job.models.get(role, self.job.model if role == POLICY else role))

    def is_policy(self, role: str) -> bool:
        return self.named(role).name == self.job.model

    def maps(self, role: str) -> bool:
        """Return whether the job maps a name to a model other than the policy."""
        return role in self.job.models and not self.is_policy(role)

    async def policy(self, role: str, *, parsed: bool = False, trained: bool = False) -> JobPolicy:
        """Return the policy that takes a model's turns, with its own record and limits.

        Args:
            role: the task's or the program's name for the model.
            parsed: whether the backend's `parser_url` reads the turns, as those of programs.
            trained: whether the turns are to be trained on.

        Raises:
            InvalidJob: the turns are to be trained on, and the model is an endpoint or frozen.
            NoBackend: no backend of the model came in the time that the job allows.
            ConfigError: the backend's chat format cannot be loaded here.
        """
        named = self.named(role)
        job = self.job if named.sampling is None else msgspec.structs.replace(self.job, sampling=named.sampling)
        endpoint = self.endpoints.find(named.name)
        if endpoint is not None:
            if trained:
                raise _not_trained(named.name, "is an endpoint")
            # Its ids are bytes, so only the server's own limits count.
            episode = msgspec.structs.replace(job.episode, max_tokens=UNLIMITED)
            chat = EndpointChat(endpoint, named.name)
            limited = msgspec.structs.replace(job, episode=episode)
            return JobPolicy(chat.generate, chat, 0, limited, Episode(), served=endpoint.model)
        held = self.held(named.name)
        async with held.opening:
            backend = await held.backend.assigned()
        if trained and backend.frozen and backend.name == named.name:
            raise _not_trained(named.name, "is frozen")
        parser_url = backend.chat.parser_url if parsed else ""
        settings = msgspec.structs.replace(backend.chat, parser_url=parser_url)
        return JobPolicy(
            held.generate,
            await chat_format(settings),
            backend.context_tokens,
            job,
            Episode(),
            parser_url,
            served=backend.model or backend.backend_id,
            logprobs_mode=backend.logprobs_mode,
        )

    def scoring(self, role: str) -> JobBackend:
        """Return the job's backend of a model that is to score texts.

        Raises:
            InvalidJob: the model is an endpoint.
        """
        name = self.named(role).name
        if self.endpoints.find(name) is not None:
            raise InvalidJob(
                f"the model {name!r} is an endpoint, which cannot score texts; use a backend", field="model"
            )
        return self.held(name).backend

    def held(self, name: str) -> _Held:
        """Return the job's backend of a model, which may not be assigned yet."""
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _Held(name, self.backend(name))
        return held

    def release(self) -> None:
        """Release all backends, or stop waiting for them."""
        for held in self._held.values():
            held.backend.release()
        self._held.clear()


def _not_trained(model: str, why: str) -> InvalidJob:
    return InvalidJob(f"the model {model!r} {why}, so its conversation cannot be trained on", field="models")


@dataclass(slots=True)
class _Held:
    """A backend of a model, as the job holds it."""

    name: str
    backend: JobBackend
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], rows_known: int = 0
    ) -> Generation:
        """Generate as `JobBackend.generate` does; a failure names the model, since it is not the policy's."""
        try:
            return await self.backend.generate(token_ids, sampling, stop_token_ids, rows_known)
        except EngineFailed as error:
            error.fields["model"] = self.name
            raise
