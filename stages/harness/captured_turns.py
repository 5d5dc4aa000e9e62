"""The tokens of a rollout's calls: the prompt of the next call, and the episode that the whole tree makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...data.trajectory_builder import TrajectoryBuilder
from ...wire.messages.jobs import MAIN
from ...wire.records import EXPERTS
from ..episode import ConversationRecord
from ..turn_sampler import rows_of_experts, version_per_token
from .adapter import CallKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from ...inference.chat import Piece
    from ..episode import Episode
    from .call_tree import CallTree, Turn

SHOWN = 60
"""Characters of a turn's text in the outline."""


def prompt_behind(parent: Turn | None, context: Collection[Piece]) -> NDArray[np.int32]:
    """Return the ids that the engine saw and generated up to a turn, then those of the new context, int32 [P]."""
    parts: list[NDArray[np.int32]] = []
    for turn in parent.path() if parent is not None else ():
        parts += [*(piece.token_ids for piece in turn.captured.context), turn.captured.generation.token_ids]
    return np.concatenate([*parts, *(piece.token_ids for piece in context)])


def rows_behind(parent: Turn | None) -> int:
    """Return how many of the ids up to a turn have rows of experts."""
    return sum(rows_of_experts(turn.captured.generation) for turn in (parent.path() if parent is not None else ()))


def last_line(tree: CallTree) -> TrajectoryBuilder:
    """Return the conversation of the last answer; empty if there is none."""
    trajectory = TrajectoryBuilder()
    for turn in tree.answered[-1].path() if tree.answered else ():
        _write(trajectory, turn)
    return trajectory


def write_episode(episode: Episode, tree: CallTree, kinds: Collection[CallKind]) -> None:
    """Write the conversations, with the lines that hold all turns of these kinds as segments.

    Count all turns, and note the tree.
    """
    episode.so_far = None
    names = dict.fromkeys(turn.conversation for turn in tree.turns if turn.said)
    builders = {name: TrajectoryBuilder() if number else episode.trajectory for number, name in enumerate(names)}
    for line in tree.segments(kinds):
        builder = builders[line[0][0].conversation]
        builder.begin_segment()
        for turn, own in line:
            _write(builder, turn, own=own)
    episode.conversations += [ConversationRecord(name, True, builder) for name, builder in builders.items()]
    orphans = tree.orphans()
    what_of = {turn: f"{orphans[turn]} orphan" if turn in orphans else turn.kind.value for turn in tree.turns}
    for turn in tree.answered:
        what = what_of[turn].replace(" ", "_")
        episode.metrics[f"{what}_turns"] += 1
        episode.metrics[f"{what}_tokens"] += len(turn.captured.generation.token_ids)
        if turn.kind == CallKind.MAIN:
            episode.last_text = turn.captured.read.text
    is_named = [*names] not in ([], [MAIN])
    episode.notes["calls"] = "\n".join(
        _shown(turn, f"{turn.conversation}: {what_of[turn]}" if is_named else what_of[turn]) for turn in tree.turns
    )


def _write(trajectory: TrajectoryBuilder, turn: Turn, *, own: bool = True) -> None:
    """Append a turn; one that is not this line's `own` is context."""
    for piece in turn.captured.context:
        if piece.new_turn:
            trajectory.begin_turn(piece.role)
        trajectory.add_context(piece.token_ids)
    said = turn.captured.generation
    if own:
        trajectory.add_generated(said.token_ids, said.logprobs, version_per_token(said))
        if said.records:
            trajectory.add_records(said.records)
    else:
        trajectory.add_context(said.token_ids)
        if EXPERTS in said.records:
            trajectory.add_records({EXPERTS: said.records[EXPERTS]})


def _shown(turn: Turn, what: str) -> str:
    """Return a turn's line of the outline."""
    place = f"after {turn.parent.number + 1}" if turn.parent is not None else "begins"
    tokens, said = "", "no reply"
    if turn.capture is not None:
        shown = sum(len(piece.token_ids) for piece in turn.capture.context)
        tokens = f"{shown} + {len(turn.capture.generation.token_ids)} tokens"
        calls = ", ".join(call.name or "unreadable call" for call in turn.capture.read.calls)
        said = calls or " ".join(turn.capture.read.content.split())[:SHOWN]
    return f"{turn.number + 1:>3}  {place:<9}  {what:<18}  {tokens:<20}  {said}".rstrip()
