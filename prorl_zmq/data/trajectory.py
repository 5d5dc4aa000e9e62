"""Trajectories: five arrays over the tokens of one conversation, in one block of memory.

A trajectory crosses every socket as one frame, and each array is a view of it:

    token_ids int32[T] | logprobs float32[T] | weight_versions int32[T] | turns int32[n, 3] | loss_mask bool[T]

Records follow behind, if the job asked for some (see `records`).
Trainers receive a `Trajectory`; the agent loop writes it with a `TrajectoryBuilder` (see `trajectory_builder`). Ids are
appended as the engine returned them and never re-tokenised.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ..errors import MalformedMessage, NotTrainable
from .conversations import labels_of, rewards_problem, tokens_of_own_model, trained_rewards
from .printed import TurnLine, conversation_text, trajectory_html, trajectory_line, turn_label
from .records import NO_RECORDS, Records, padded, read_records, records_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..errors import ErrorInfo
    from ..wire.messages.jobs import ConversationPart, RecordForm, Result
    from ..wire.messages.stages import PhaseDone, PhaseFailed

TOKEN_BYTES = 13
TOKEN_ID_BYTES = 4
"""Of its id; all ids come first in a block."""
"""Bytes per token: three 4-byte values and one bool."""
TURN_BYTES = 12
"""Bytes per turn: three int32."""


class Role(IntEnum):
    """Who wrote a turn; the third column of `turns`."""

    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TOOL = 3


class TokenArrays(NamedTuple):
    """The five arrays of a trajectory of T tokens in n turns."""

    token_ids: NDArray[np.int32]
    """int32 [T]: the whole conversation, exactly as the engine saw and produced it."""
    loss_mask: NDArray[np.bool_]
    """bool [T]: true where the policy generated the token."""
    logprobs: NDArray[np.float32]
    """float32 [T]: the engine's log-prob of each generated token; 0.0 where the mask is false."""
    weight_versions: NDArray[np.int32]
    """int32 [T]: the weight version that generated each token; -1 where the mask is false."""
    turns: NDArray[np.int32]
    """int32 [n, 3]: per turn its first token, the token after its last, and its `Role`."""


class Segment(TokenArrays):
    """The five arrays of a segment; with its records."""

    records: Records = NO_RECORDS
    """Those of the segment's tokens; rows count from its first token."""


def block_bytes(tokens: int, turns: int, records: Sequence[RecordForm] = ()) -> int:
    """Return the size in bytes of the block that holds a trajectory of that many tokens and turns, and its records."""
    arrays = tokens * TOKEN_BYTES + turns * TURN_BYTES
    return padded(arrays) + records_bytes(records) if records else arrays


def records_at(tokens: int, turns: int, records: Sequence[RecordForm]) -> int:
    """Return the byte of the block at which the records begin; 0: there are none."""
    return padded(block_bytes(tokens, turns)) if records else 0


def array_views(block: Any, tokens: int, turns: int, records: Sequence[RecordForm] = ()) -> TokenArrays:
    """Return the arrays as views of `block` (any buffer); nothing is copied if the block is 4-byte aligned.

    libzmq does not align small received frames, so such a block (always under 8 KB) is copied once.

    Raises:
        MalformedMessage: the block's size is not that of so many tokens and turns, and of these records.
    """
    flat = np.frombuffer(block, np.uint8)
    if flat.size != (size := block_bytes(tokens, turns, records)):
        raise MalformedMessage(f"{tokens} tokens in {turns} turns take {size} bytes, not {flat.size}")
    if flat.ctypes.data % 4:
        flat = flat.copy()
    word = 4 * tokens
    turns_end = 3 * word + turns * TURN_BYTES
    return TokenArrays(
        token_ids=flat[:word].view(np.int32),
        logprobs=flat[word : 2 * word].view(np.float32),
        weight_versions=flat[2 * word : 3 * word].view(np.int32),
        turns=flat[3 * word : turns_end].view(np.int32).reshape(turns, 3),
        loss_mask=flat[turns_end : turns_end + tokens].view(np.bool_),
    )


def records_in(block: Any, ended: Result | PhaseDone | PhaseFailed) -> Records:
    """Return the records in a block of the announced size, as views.

    Raises:
        MalformedMessage: segments or records cannot be those of its tokens.
    """
    segments, tokens, forms = ended.segments, ended.tokens, ended.records
    if segments and (list(segments) != sorted(set(segments)) or segments[-1] >= (tokens or 1)):
        raise MalformedMessage(f"segments cannot begin at {segments} in {tokens} tokens")
    return read_records(block, records_at(tokens, ended.turns, forms), forms, tokens) if forms else NO_RECORDS


def pack_block(arrays: TokenArrays) -> NDArray[np.uint8]:
    """Return arrays in one new block, uint8 [`block_bytes(T, n)`]."""
    tokens, turns = len(arrays.token_ids), len(arrays.turns)
    block = np.empty(block_bytes(tokens, turns), np.uint8)
    for view, array in zip(array_views(block, tokens, turns), arrays, strict=True):
        view[:] = array
    return block


def oldest_version(block: Any, ended: Result | PhaseDone | PhaseFailed) -> int:
    """Return the oldest weight version of the tokens that a job's own model generated; -1 if it generated none.

    Raises:
        MalformedMessage: as `array_views` and `tokens_of_own_model`.
    """
    versions = array_views(block, ended.tokens, ended.turns, ended.records).weight_versions
    own = _joined([versions[tokens] for tokens in tokens_of_own_model(ended)])
    generated = own[own >= 0]
    return int(generated.min()) if len(generated) else -1


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One finished job: five arrays (see `TokenArrays`) and its result.

    The arrays are views of the received frame, which this trajectory owns. A job that ended before its first token has
    arrays of length zero.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    turns: NDArray[np.int32]
    result: Result
    """Everything about the job that is not an array."""
    records: Records = NO_RECORDS
    """What `Job.record` asked for, by the names of its arrays, and the tokens whose rows are known."""

    @property
    def job_id(self) -> str:
        """The job's id, as submitted."""
        return self.result.job_id

    @property
    def group_id(self) -> str:
        """The id that the jobs of one prompt share, as submitted."""
        return self.result.group_id

    @property
    def outcome(self) -> str:
        """`completed`, `failed`, `infrastructure_error`, `timeout` or `cancelled`."""
        return self.result.outcome

    @property
    def reward(self) -> float | None:
        """The reward; None unless the outcome is `completed`, or the agent itself is why it is not: then it is 0.0."""
        return self.result.reward

    @property
    def error(self) -> ErrorInfo | None:
        """What went wrong; None if the outcome is `completed`."""
        return self.result.error

    @property
    def logprobs_mode(self) -> str:
        """Which distribution the log-probs are of (see `messages.LogprobsMode`); empty if nothing was generated."""
        return self.result.logprobs_mode

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that generated its tokens, ascending; several if weights changed on the way.

        They are those of `result.model`; tokens of other models do not count (see `split`).
        """
        own = tokens_of_own_model(self.result)
        return tuple(np.unique(_joined([self.weight_versions[one][self.loss_mask[one]] for one in own])).tolist())

    @property
    def generated_tokens(self) -> int:
        """How many of its tokens the policy generated."""
        return int(np.count_nonzero(self.loss_mask))

    def text(self, decode: Callable[[list[int]], str] | None = None) -> str:
        """Return the conversation for reading: one line of figures, then each turn below its role.

        Control characters are written as escapes, so it can be printed to a terminal.

        Args:
            decode: The tokenizer's: token ids to text. None: turns are shown as token ids.
        """
        read = decode or (lambda ids: " ".join(map(str, ids)))
        labels = labels_of(self.result, self.turns)
        turns = (
            (turn_label(_role_name(role), *labels.get(index, ("", None))), read(self.token_ids[start:end].tolist()))
            for index, (start, end, role) in enumerate(self._turns())
        )
        return conversation_text(self._line(), turns, self.result)

    def __repr__(self) -> str:
        return f"<Trajectory {self._line()}>"

    def _repr_html_(self) -> str:
        """Return the form in which a notebook shows it."""
        labels = labels_of(self.result, self.turns)
        turns = [
            self._turn_line(turn_label(_role_name(role), *labels.get(index, ("", None))), start, end)
            for index, (start, end, role) in enumerate(self._turns())
        ]
        return trajectory_html(self._line(), turns, self.result)

    def _line(self) -> str:
        return trajectory_line(self.result, self.generated_tokens, self.versions)

    def _turns(self) -> list[list[int]]:
        turns: list[list[int]] = self.turns.tolist()
        return turns

    def _turn_line(self, name: str, start: int, end: int) -> TurnLine:
        logprobs = self.logprobs[start:end][self.loss_mask[start:end]]
        mean = float(logprobs.mean()) if len(logprobs) else None
        return TurnLine(name, start, end, len(logprobs), mean)

    def segments(self) -> list[Segment]:
        """Return the arrays and records of each segment, as views; nearly all trajectories have one.

        A segment is a prompt as the engine saw it, with what was generated from it: where a chat template changes
        earlier turns, the next prompt does not begin with the last one, and a new segment begins. `turns` count from
        the segment's first token.
        """
        edges = [0, *self.result.segments, len(self.token_ids)]
        return [self._segment(start, end) for start, end in pairwise(edges)]

    def split(self) -> list[Trajectory]:
        """Return a trajectory for each trained conversation, as views: its arrays, its reward and its stop reason.

        Its `group_id` is this one's and the conversation's name, such as `7f3a/white`: a group then has one role, and
        the baseline of an advantage is that role's. `result.agent` is the conversation's name, and `result.model` the
        model that generated its tokens. A conversation in which nothing was generated has none. A rollout whose
        conversations have no names is returned as it is.
        """
        result = self.result
        if not result.conversations:
            return [self]
        edges = [0, *result.segments, len(self.token_ids)]
        rewards = trained_rewards(result)
        parts = [
            self._part(edges[part.first_segment : part.first_segment + part.segments + 1], part, rewards[part.name])
            for part in result.conversations
            if part.name in rewards
        ]
        return [part for part in parts if part.loss_mask.any()]

    def _part(self, edges: list[int], part: ConversationPart, reward: float | None) -> Trajectory:
        start, end = edges[0], edges[-1]
        arrays = self._segment(start, end)
        first = int(np.searchsorted(self.turns[:, 0], start))
        of_other = {"model": part.model, "logprobs_mode": part.logprobs_mode, "backend": ""} if part.model else {}
        result = msgspec.structs.replace(
            self.result,
            agent=part.name,
            group_id=f"{self.group_id}/{part.name}",
            reward=reward,
            stop_reason=part.stop_reason or self.result.stop_reason,
            tokens=end - start,
            turns=len(arrays.turns),
            records=(),
            segments=tuple(edge - start for edge in edges[1:-1]),
            conversations=(),
            turn_rewards=tuple(
                (turn - first, own) for turn, own in self.result.turn_rewards if 0 <= turn - first < len(arrays.turns)
            ),
            **of_other,
        )
        return Trajectory(**arrays._asdict(), result=result, records=arrays.records)

    def reward_places(self) -> list[tuple[int, float]]:
        """Return where the turns' rewards belong: the last generated token of each turn that has one, and its reward.

        Raises:
            NotTrainable: nothing was generated in such a turn.
        """
        places = []
        for turn, reward in self.result.turn_rewards:
            start, end, _ = self.turns[turn].tolist()
            generated = np.flatnonzero(self.loss_mask[start:end])
            if not len(generated):
                raise NotTrainable(
                    f"job {self.job_id} has the reward {reward:g} on turn {turn}, in which nothing was generated",
                    group_id=self.group_id,
                    job_id=self.job_id,
                )
            places.append((start + int(generated[-1]), reward))
        return places

    def _segment(self, start: int, end: int) -> Segment:
        within = (self.turns[:, 0] >= start) & (self.turns[:, 1] <= end)
        if end < len(self.token_ids):
            within &= self.turns[:, 0] < end  # a turn without tokens at the edge is the next segment's
        turns = self.turns[within]
        segment = Segment(
            self.token_ids[start:end],
            self.loss_mask[start:end],
            self.logprobs[start:end],
            self.weight_versions[start:end],
            turns - np.array([start, start, 0], np.int32),
        )
        if self.records:
            segment.records = self.records.part(start, end)
        return segment

    @classmethod
    def from_frame(cls, result: Result, block: Any) -> Trajectory:
        """Lay the views over one received frame.

        Raises:
            MalformedMessage: the frame's size is not what `result` says, or its segments or records cannot be.
        """
        if (result.conversations or result.turn_rewards) and (problem := rewards_problem(result)):
            raise MalformedMessage(f"job {result.job_id}: {problem}")
        arrays = array_views(block, result.tokens, result.turns, result.records)
        return cls(**arrays._asdict(), result=result, records=records_in(block, result))


def _joined(versions: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return versions[0] if len(versions) == 1 else np.concatenate([np.empty(0, np.int32), *versions])


def _role_name(role: int) -> str:
    return Role(role).name.lower()
