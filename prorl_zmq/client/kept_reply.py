"""A reply whose results name blocks that nodes keep, made whole with the blocks that were fetched. No sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..errors import MalformedMessage
from ..wire import codec
from ..wire.messages.batches import GroupGiven
from ..wire.messages.front_door import Collect, Collected
from ..wire.messages.jobs import Result
from .requests import read_reply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..wire.messages.batches import NextGroup
    from ..wire.messages.jobs import BlockHandle
    from .requests import Received

KEPT = codec.pack("kept")
"""Is in the header of every reply to `Collect` that names such a block."""


def handles_in(request: Collect | NextGroup, frames: Sequence[Received]) -> dict[str, BlockHandle]:
    """Return the blocks that the reply to a request names and lacks, by job."""
    if isinstance(request, Collect) and KEPT not in _header(frames[0]):
        return {}
    return {result.job_id: result.kept for result in _results(frames) if result.kept is not None}


def completed(frames: Sequence[Received], blocks: Mapping[str, Received]) -> tuple[list[Received], list[str]]:
    """Return a reply with these blocks in their places, and the jobs that lack theirs.

    A result without its block is left out, a group as a whole.
    """
    reply, results = read_reply(frames), _results(frames)
    lacking = [one.job_id for one in results if one.kept is not None and not _fits(one, blocks.get(one.job_id))]
    there = [result for result in results if result.job_id not in lacking]
    rest = iter(frames[1:])
    made: list[Received] = [frames[0]]
    if isinstance(reply, GroupGiven) and lacking:
        return [codec.encode(replace(reply, group_id="", prompt_id="", rollouts=0))], lacking
    if lacking:
        made = [codec.encode(replace(reply, results=tuple(there), remaining=reply.remaining + len(lacking)))]
    for result in there:
        if isinstance(reply, GroupGiven):
            made.append(next(rest))
        if result.tokens:
            made.append(blocks[result.job_id] if result.kept is not None else next(rest))
    return made, lacking


def _results(frames: Sequence[Received]) -> list[Result]:
    reply = read_reply(frames)
    if isinstance(reply, Collected):
        return list(reply.results)
    if not isinstance(reply, GroupGiven):
        return []
    rest = iter(frames[1:])
    found: list[Result] = []
    for _ in range(reply.rollouts):
        packed = next(rest, None)
        if packed is None:
            raise MalformedMessage("a rollout of the group is missing from the reply")
        result: Result = codec.decode(_header(packed), Result)
        if result.tokens and result.kept is None:
            next(rest, None)
        found.append(result)
    return found


def _header(frame: Received) -> bytes:
    return frame if isinstance(frame, bytes) else frame.bytes


def _fits(result: Result, block: Received | None) -> bool:
    from ..data.trajectory import block_bytes  # with numpy, which commands without results can do without

    return block is not None and len(block) == block_bytes(result.tokens, result.turns)
