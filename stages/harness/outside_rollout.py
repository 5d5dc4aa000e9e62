"""One rollout led by a program outside of the service: its calls, its end, and its idle time.

Calls arrive through the RUN process's HTTP server (`rollout_door`), each with the rollout's key. The program ends the
rollout with `POST {address}/finish`, whose body is `{"reward": number}`, or `{}` where the task judges. A program that
makes no call for `Outside.idle_s` is considered dead. Time in which a call is being answered is not idle.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from ...errors import PhaseTimeout
from ...model_proxy.server import ModelServer, json_answer
from ..episode import StopReason
from .harness_model import HarnessModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from ...inference.chat import ChatMessage
    from ..episode import JobPolicy

CLOSE_S = 1.0
"""How long calls under way may take once the program has ended the rollout."""
FINISH_BYTES = 4096
"""Largest body of `finish`."""


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `finish`."""

    reward: float | None = None
    """None: the task judges."""


class Door(Protocol):
    """Where the calls of rollouts come in: a `RolloutDoor`."""

    async def open(self, rollout: OutsideRollout) -> None:
        """Take calls of a rollout."""

    def shut(self, rollout: OutsideRollout) -> None:
        """Take no more calls of a rollout."""


class OutsideRollout:
    """One rollout.

    Args:
        policy: whose job has an `outside`.
        messages: the task's own; a call with the user's text is of the main conversation.
        grades: the task can judge without a reward of the program's.
    """

    def __init__(self, policy: JobPolicy, messages: Sequence[ChatMessage], *, grades: bool = True) -> None:
        assert policy.job.outside is not None, "a program outside leads it"
        self.job = policy.job
        self.reward: float | None = None
        """What the program reported."""
        self.finished = False
        """The program has ended the rollout."""
        self._outside = policy.job.outside
        self._episode = policy.episode
        self._grades = grades
        self._model = HarnessModel(policy, messages)
        self._server = ModelServer(self._model, key_sha256=self._outside.key_sha256)
        self._under_way = 0
        self._idle_from = time.monotonic()
        self._changed = asyncio.Event()
        """Set when a call begins or ends, and at the end."""

    async def lead(self, door: Door) -> None:
        """Serve the program until it ends the rollout; write what was sampled to the episode, however it ends.

        Raises:
            PhaseTimeout: the program made no call for too long.
            EngineFailed: the program ended the rollout, and the engine has answered none of its calls.
        """
        self._episode.notes["harness"] = "a program outside of the service"
        await door.open(self)
        try:
            await self._end()
        finally:
            door.shut(self)
            await self._server.close(CLOSE_S if self.finished else 0.0)
            await self._model.finish(self._outside.train_on)
        if self._model.failure is not None and not self._model.answered:
            raise self._model.failure
        if self._episode.stop_reason is None:
            self._episode.stop_reason = StopReason.DONE
        if self.reward is not None:
            self._episode.metrics["reward_reported"] = 1

    def add_time(self, seconds: float) -> None:
        """Let the program be silent for longer: this process did not run for so long."""
        self._idle_from += seconds
        self._changed.set()

    async def answer(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of the program; others do not count, and get a 401."""
        if not self._server.is_shown_the_key(http):
            return self._server.refuse_key(http)
        self._under_way += 1
        self._changed.set()
        try:
            if http.path.endswith("/finish"):
                return await self._finish(http)
            return await self._server.handle(http)
        finally:
            self._under_way -= 1
            self._idle_from = time.monotonic()
            self._changed.set()

    async def _end(self) -> None:
        """Wait for the end."""
        idle_s = self._outside.idle_s
        while not self.finished:
            self._changed.clear()
            left_s = None if self._under_way else self._idle_from + idle_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise PhaseTimeout(
                    f"the program outside made no call for {idle_s:g} s and did not end its rollout",
                    phase="run",
                    limit_s=idle_s,
                )
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                continue

    async def _finish(self, http: web.BaseRequest) -> web.StreamResponse:
        if http.method != "POST":
            return json_answer(405, f"finish takes POST, not {http.method}")
        try:
            asked = msgspec.json.decode(await _body(http) or b"{}", type=Finish)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            return json_answer(400, f'finish takes {{"reward": number}} or {{}}: {error}')
        if asked.reward is not None and not math.isfinite(asked.reward):
            return json_answer(400, "the reward must be a finite number")
        if self.finished:
            return ended_answer(self.job.job_id, self.reward, asked.reward)
        if asked.reward is None and not self._grades:
            return json_answer(400, f"the task {self.job.task} does not judge: finish with a reward")
        if not self._model.answered and self._model.failure is None:
            return json_answer(
                409, "no call of the model was answered, so there is nothing to learn from: cancel the rollout instead"
            )
        self.finished, self.reward = True, asked.reward
        return finished_answer(self.reward)


def finished_answer(reward: float | None) -> web.Response:
    """Return the answer to a `finish` that has ended its rollout."""
    from aiohttp import web

    return web.Response(body=msgspec.json.encode({"status": "finished", "reward": reward}), content_type=JSON)


def ended_answer(job_id: str, reward: float | None, asked: float | None) -> web.Response:
    """Return the answer to a further `finish`: the same again gets the same answer."""
    if asked == reward:
        return finished_answer(reward)
    told = "the task's judgement" if reward is None else f"reward {reward:g}"
    return json_answer(409, f"the rollout {job_id} was ended before, with {told}, which stays")


JSON = "application/json"


async def _body(http: web.BaseRequest) -> bytes:
    data = bytearray()
    async for chunk in http.content.iter_any():
        data += chunk
        if len(data) > FINISH_BYTES:
            raise ValueError(f"the body has more than {FINISH_BYTES} bytes")
    return bytes(data)
