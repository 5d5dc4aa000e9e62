"""The tokens of a rollout's calls: what each turn added to its line, and the trajectory made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...data.trajectory import TrajectoryBuilder
from ..turn_sampler import version_per_token
from .call_tree import CallKind

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection

    from numpy.typing import NDArray

    from ...inference.chat import Piece, ReadTurn
    from ...inference.engine import Generation
    from .call_tree import CallTree, Turn

SHOWN = 60
"""Characters of what a turn says in the outline."""


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """What a turn added to its line."""

    context: tuple[Piece, ...]
    """What the engine was shown that it had not seen in this line."""
    generation: Generation
    read: ReadTurn


class CapturedTurns:
    """The turns of one rollout that were answered, in the order of their answers."""

    def __init__(self, tree: CallTree) -> None:
        self._tree = tree
        self._captures: dict[Turn, Capture] = {}

    def __len__(self) -> int:
        return len(self._captures)

    def __getitem__(self, turn: Turn) -> Capture:
        return self._captures[turn]

    def add(self, turn: Turn, capture: Capture) -> None:
        """Keep what a turn added."""
        self._captures[turn] = capture

    def prompt(self, parent: Turn | None, context: Collection[Piece]) -> NDArray[np.int32]:
        """Return the ids of what the engine saw and said up to a turn, and of the context behind it, int32 [P]."""
        parts: list[NDArray[np.int32]] = []
        for turn in parent.path() if parent is not None else ():
            capture = self._captures[turn]
            parts += [piece.token_ids for piece in capture.context]
            parts.append(capture.generation.token_ids)
        return np.concatenate([*parts, *(piece.token_ids for piece in context)])

    def last_text(self) -> str:
        """Return the text of the last turn of the main line; empty if there is none."""
        texts = [capture.read.text for turn, capture in self._captures.items() if turn.kind == CallKind.MAIN]
        return texts[-1] if texts else ""

    def write(self, trajectory: TrajectoryBuilder, kinds: Collection[CallKind]) -> None:
        """Write the lines that hold all turns of these kinds, a segment each; a turn is generated tokens only once."""
        for line in self._tree.segments(kinds):
            trajectory.begin_segment()
            for turn, own in line:
                self._write_turn(trajectory, turn, own=own)

    def last_line(self) -> TrajectoryBuilder:
        """Return the conversation that the last answer belongs to; empty if there is none."""
        trajectory = TrajectoryBuilder()
        last = next(reversed(self._captures), None)
        for turn in last.path() if last is not None else ():
            self._write_turn(trajectory, turn, own=True)
        return trajectory

    def _write_turn(self, trajectory: TrajectoryBuilder, turn: Turn, *, own: bool) -> None:
        capture = self._captures[turn]
        for piece in capture.context:
            if piece.new_turn:
                trajectory.begin_turn(piece.role)
            trajectory.add_context(piece.token_ids)
        generation = capture.generation
        if own:
            versions = version_per_token(generation)
            trajectory.add_generated(generation.token_ids, generation.logprobs, versions)
        else:
            trajectory.add_context(generation.token_ids)

    def count(self, metrics: Counter[str]) -> None:
        """Count turns and generated tokens by kind; those of orphans by why they are."""
        orphans = self._tree.orphans()
        for turn, capture in self._captures.items():
            what = f"{orphans[turn]}_orphan" if turn in orphans else turn.kind.value
            metrics[f"{what}_turns"] += 1
            metrics[f"{what}_tokens"] += len(capture.generation.token_ids)

    def outline(self) -> str:
        """Return the tree for people, a line per turn."""
        orphans = self._tree.orphans()
        lines: list[str] = []
        for turn in self._tree.turns:
            place = f"after {turn.parent.number + 1}" if turn.parent is not None else "begins"
            kind = f"{orphans[turn]} orphan" if turn in orphans else turn.kind.value
            tokens, said = "", "no reply"
            if (capture := self._captures.get(turn)) is not None:
                shown = sum(len(piece.token_ids) for piece in capture.context)
                tokens = f"{shown} + {len(capture.generation.token_ids)} tokens"
                calls = ", ".join(call.name or "unreadable call" for call in capture.read.calls)
                said = calls or " ".join(capture.read.content.split())[:SHOWN]
            lines.append(f"{turn.number + 1:>3}  {place:<9}  {kind:<18}  {tokens:<20}  {said}".rstrip())
        return "\n".join(lines)
