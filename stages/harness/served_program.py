"""A program of an environment that calls the model itself, at an address of its rollout alone.

program, in the environment's worker  → 127.0.0.1:PORT, with a key → model server, in this process → engine
"""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING, Any

from ...errors import HandlerFailed, InvalidJob
from ...model_proxy.server import ModelServer
from ..episode import StopReason
from .harness_model import MODEL, HarnessModel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..episode import Episode, JobPolicy

CLOSE_S = 1.0
"""Seconds in which calls under way must end after the program has ended."""
BACKLOG = 64
TRAIN_ON = ("all",)
"""Programs have no task that would identify a main conversation."""


async def serve_program(
    policy: JobPolicy,
    play: Callable[[str, str, Sequence[str]], Awaitable[tuple[dict[str, Any], Sequence[tuple[int, float]]]]],
) -> dict[str, Any]:
    """Serve a rollout's model while `play(url, key, models)` runs, and write the sampled turns to the episode.

    Raises:
        HandlerFailed: a reward belongs to no turn, or the program's calls are no single line of turns.
        EngineFailed: the engine failed, and the program got no answer.
        InvalidJob: the program ended without a call that could be answered.
    """
    model = HarnessModel(policy)
    key = secrets.token_hex(16)
    server = ModelServer(model, key=key, named=True)
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    listener.setblocking(False)
    port = listener.getsockname()[1]
    await server.start(listener)
    try:
        data, rewards = await play(f"http://127.0.0.1:{port}/v1", key, (MODEL, *policy.job.models))
    except Exception as error:
        raise (model.failure or error) if not model.answered else error from error
    finally:
        await server.close(CLOSE_S)
        await model.finish(TRAIN_ON)
    if not model.answered:
        if model.failure is not None:
            raise model.failure
        why = model.limits.too_long.message if model.limits.too_long is not None else "it made none"
        raise InvalidJob(f"the environment ended without a model call that could be answered: {why}", field="instance")
    episode = policy.episode
    episode.stop_reason = episode.stop_reason or model.limits.limited_by or StopReason.ENVIRONMENT
    episode.turn_rewards += _rows_of(episode, rewards)
    return data


def _rows_of(episode: Episode, rewards: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    trajectory = episode.whole()
    if rewards and trajectory.segments:
        raise HandlerFailed(
            "the environment gave rewards to turns, but its model calls are several conversations; give one reward"
        )
    arrays = trajectory.arrays()
    rows = [row for row, (start, end, _) in enumerate(arrays.turns) if arrays.loss_mask[start:end].any()]
    by_turn = dict(rewards)
    if len(by_turn) < len(rewards):
        raise HandlerFailed("the environment gave a turn two rewards")
    for turn, reward in by_turn.items():
        if not 0 <= turn < len(rows):
            raise HandlerFailed(
                f"the environment gave turn {turn} the reward {reward:g}; the rollout has {len(rows)} turns"
            )
    return [(rows[turn], by_turn[turn]) for turn in sorted(by_turn)]
