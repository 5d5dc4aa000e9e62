"""What a trajectory holds, by segment."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from prorl_zmq.data.trajectory import TokenArrays, array_views

if TYPE_CHECKING:
    from prorl_zmq.data.trajectory_builder import TrajectoryBuilder


def segments_of(trajectory: TrajectoryBuilder) -> list[TokenArrays]:
    """The arrays of each segment of what was built; without tokens there is none."""
    arrays = array_views(trajectory.block(), trajectory.tokens, trajectory.turns)
    edges = [0, *trajectory.segments, trajectory.tokens]
    return [
        TokenArrays(*(array[start:end] for array in arrays[:4]), arrays.turns)
        for start, end in pairwise(edges)
        if end > start
    ]
