"""The answer of a stage process to `ShowTurns`: the last turns of a running rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..data.last_turns import turns_so_far
from ..wire import codec
from ..wire.messages.stages import TurnsShown

if TYPE_CHECKING:
    from ..wire.messages.stages import ShowTurns
    from ..wire.sockets import Frame
    from .episode import Episode


def show_turns(stage_id: str, question: ShowTurns, rollout: tuple[Episode, str] | None) -> list[Frame]:
    """Return the frames of the answer of a stage process.

    Args:
        stage_id: its name.
        question: what was asked.
        rollout: as far as it has come, and its backend; None: it is not here.
    """
    so_far, block = None, None
    if rollout is not None:
        episode, backend = rollout
        trajectory = episode.so_far() if episode.so_far is not None else episode.trajectory
        steps = tuple(episode.steps)
        so_far, block = turns_so_far(trajectory.arrays(), backend, steps, question.known_tokens)
    answer = TurnsShown(
        stage_id=stage_id,
        job_id=question.job_id,
        attempt=question.attempt,
        known_tokens=question.known_tokens,
        origin=question.origin,
        so_far=so_far,
    )
    header = codec.encode(answer, is_plain=True)
    return [header] if block is None else [header, block.data]
