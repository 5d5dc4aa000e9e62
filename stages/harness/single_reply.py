"""One reply of a model to one request, for the task `sample`: to a chat, as harnesses get it, or to a text or ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.single_reply import RepliedCall, SingleReply
from ...data.trajectory import Role
from ...errors import EngineFailed, InvalidJob
from ...model_proxy.calls import CallRefused, Problem
from ...model_proxy.dialects.chat_completions import ChatCompletions
from ...wire.messages.base import NOTE_LIMIT, NOTES_LIMIT
from ..episode import UNLIMITED, StopReason
from ..turn_sampler import TurnSampler, version_per_token
from .harness_model import MODEL, HarnessModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...inference.engine import Generation
    from ..episode import JobPolicy
    from ..handlers.sample import SampleInstance

LARGEST_ID = 2**31 - 1
OTHER_NOTES = 2
"""Notes of a rollout beside the reply's."""


async def reply_to(policy: JobPolicy, asked: SampleInstance) -> None:
    """Have a model reply; write the tokens to the policy's episode, and the reply to its notes.

    Raises:
        InvalidJob: the request is wrong, or too long for the model; `problem` is a `model_proxy.calls.Problem`, and
            `tokens` and `limit` are those of a prompt that is too long. Or the reply is too long for a result.
        EngineFailed: the engine failed.
    """
    reply = await (_chat_reply(policy, asked.chat) if asked.chat else _continued(policy, asked))
    policy.episode.stop_reason = StopReason.TURN_LENGTH if reply.finish_reason == "length" else StopReason.DONE
    notes = reply.notes(NOTE_LIMIT)
    if len(notes) > NOTES_LIMIT - OTHER_NOTES:
        most = NOTE_LIMIT * (NOTES_LIMIT - OTHER_NOTES)
        raise refused(Problem.INVALID, f"the reply's text has more than {most} characters; ask for fewer tokens")
    policy.episode.notes.update(notes)


async def _chat_reply(policy: JobPolicy, body: dict[str, Any]) -> SingleReply:
    model = HarnessModel(policy)
    try:
        call = await model.open(ChatCompletions().read({**body, "model": MODEL}, {}))
        try:
            reply = await call.reply()
        finally:
            call.close(delivered=True)
    except CallRefused as error:
        raise model.failure or refused(error.problem, error.message, error.tokens, error.limit) from error
    finally:
        await model.finish()
    return SingleReply(
        text=reply.text,
        finish_reason=reply.finish_reason,
        reasoning=reply.reasoning,
        calls=tuple(RepliedCall(one.call_id, one.name, one.arguments) for one in reply.calls),
        stopped_by=reply.stopped_by,
        cached_tokens=reply.usage.cached,
        reasoning_tokens=reply.usage.reasoning,
    )


async def _continued(policy: JobPolicy, asked: SampleInstance) -> SingleReply:
    if asked.token_ids and not 0 <= min(asked.token_ids) <= max(asked.token_ids) <= LARGEST_ID:
        raise refused(Problem.INVALID, f"the prompt holds a token id outside of 0 to {LARGEST_ID}")
    prompt = policy.chat.encode(asked.text) if asked.text else np.array(asked.token_ids, np.int32)
    limit = policy.context_tokens or UNLIMITED
    if len(prompt) >= limit:
        words = f"the prompt has {len(prompt)} tokens, and the limit is {limit} with the answer"
        raise refused(Problem.CONTEXT_LENGTH, words, len(prompt), limit)
    try:
        sampler = TurnSampler(policy, policy.job.sampling, turn_ends=asked.turn_ends)
        generation = await sampler.sample(prompt, limit - len(prompt), 0)
    except EngineFailed as error:
        if error.fields.get("refused"):
            raise refused(Problem.INVALID, error.message) from error
        raise
    _write(policy, prompt, generation)
    text, stopped_by = _text(policy, generation)
    return SingleReply(
        text=text,
        prompt_text=policy.chat.decode(prompt) if asked.echo else "",
        finish_reason="length" if generation.finish_reason == "length" else "stop",
        stopped_by=stopped_by,
        cached_tokens=generation.cached_tokens,
    )


def _write(policy: JobPolicy, prompt: NDArray[np.int32], generation: Generation) -> None:
    trajectory = policy.episode.trajectory
    trajectory.begin_turn(Role.USER)
    trajectory.add_context(prompt)
    trajectory.begin_turn(Role.ASSISTANT)
    trajectory.add_generated(generation.token_ids, generation.logprobs, version_per_token(generation))
    if generation.records:
        trajectory.add_records(generation.records)


def _text(policy: JobPolicy, generation: Generation) -> tuple[str, str]:
    """Return the text before what ended the reply, and the text of `stop` that did; empty: none did."""
    ids, sampling = generation.token_ids, policy.job.sampling
    ends = {*policy.chat.stop_token_ids, *sampling.stop_token_ids}
    if generation.finish_reason == "stop" and int(ids[-1]) in ends:
        ids = ids[:-1]
    text = policy.chat.decode(ids)
    found = min(((at, stop) for stop in sampling.stop if (at := text.find(stop)) >= 0), default=None)
    return (text, "") if found is None else (text[: found[0]], found[1])


def refused(problem: Problem, message: str, tokens: int = 0, limit: int = 0) -> InvalidJob:
    return InvalidJob(message, field="instance", problem=str(problem), tokens=tokens, limit=limit)
