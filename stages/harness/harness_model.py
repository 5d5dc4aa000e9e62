"""Answers a harness's calls: prompts of exact token ids, turns from the job's backend, all of it captured.

The prompt of a call is what the engine saw and generated up to the turn that the call continues (`call_tree`), then the
ids of the new messages: text that the engine has seen is never tokenised again. `call_limits` limits the calls. One
object per attempt, on the loop of its RUN process.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...data.trajectory import Role
from ...errors import EngineFailed, InvalidJob
from ...inference.chat import ChatMessage, PastCall
from ...inference.http.turn_parser import TurnParser
from ...inference.tool_calls.call import ToolCall
from ...model_proxy.calls import CallRefused, ModelReply, Problem, ReplyCall, Usage, new_turn_id
from ...system.traces import current_traceparent, span
from ..conversation import LONG_TEXT
from ..turn_sampler import TurnSampler
from .adapter import CallKind
from .call_limits import CALLS_AT_ONCE, CallLimits, text_size
from .call_tree import CallTree, Capture, Said
from .captured_turns import last_line, prompt_behind, rows_behind, write_episode
from .other_calls import OtherCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...errors import ProrlError
    from ...inference.chat import Piece, ReadTurn
    from ...inference.engine import Generation
    from ...model_proxy.calls import FinishReason, ModelRequest, RequestMessage
    from ..episode import JobPolicy
    from .call_tree import Place, Turn
    from .other_calls import OtherCall

MODEL = "policy"
"""The model's name for harnesses; some derive the context window from a known name."""


class HarnessModel:
    """Implements `model_proxy.calls.Model`; `finish` it.

    Args:
        policy: its sampling and limits override a harness's.
        task: the opening messages; the user's identify the main conversation.
        refusal_status: see `model_proxy.calls.Model`.
        kind_of: returns the kind of a call from its headers (see `Adapter.kind_of`).
    """

    name = MODEL

    def __init__(
        self,
        policy: JobPolicy,
        task: Sequence[ChatMessage] = (),
        *,
        refusal_status: int = 400,
        kind_of: Callable[[Mapping[str, str]], CallKind | None] = lambda _headers: None,
    ) -> None:
        self.policy = policy
        self.prompt = "\n\n".join(message.content for message in task if message.role == Role.USER)
        self.refusal_status = refusal_status
        self.failed: EngineFailed | None = None
        """Why the last call that reached the engine failed, if it did."""
        self.limits = CallLimits(policy)
        self.tree = CallTree(self.prompt)
        self.engine = _EngineTime()
        self.parser: TurnParser | None = None
        if policy.parser_url:
            self.parser = TurnParser(policy.parser_url, policy.chat, limit=CALLS_AT_ONCE)
        self.traceparent = current_traceparent()
        """The phase's; calls run in tasks of the server."""
        self._kind_of = kind_of
        self._others = OtherCalls(policy, partial(HarnessModel, refusal_status=refusal_status))
        self._counting = asyncio.Lock()
        policy.episode.so_far = lambda: last_line(self.tree)

    @property
    def failure(self) -> ProrlError | None:
        """Why the last call of the policy, or of another model, failed, if one did."""
        return self.failed or self._others.failure

    @property
    def answered(self) -> int:
        """Calls that got a reply."""
        return len(self.tree.answered)

    def charge(self, cost: int) -> None:
        """Charge the rollout for a body (see `model_proxy.calls.Model.charge`)."""
        self.limits.charge(cost)

    async def open(self, request: ModelRequest) -> HarnessCall | OtherCall:
        """Accept a call (see `model_proxy.calls.Model.open`)."""
        if self._others.takes(request.model):
            self.limits.check_not_over()
            return await self._others.open(request)
        self.limits.check_call()
        try:
            self.limits.check_request(request)
            return await self._opened(request)
        except CallRefused as refused:
            self.limits.note_too_long(refused)
            raise

    async def _opened(self, request: ModelRequest) -> HarnessCall:
        metrics = self.policy.episode.metrics
        if request.sampling:
            metrics["calls_with_own_sampling"] += 1
        if request.model != MODEL and not self._others.maps(request.model):
            metrics["calls_of_another_model"] += 1
        place = self.tree.locate(request)
        turn = self.tree.open(new_turn_id(), request, place, self._kind_of(request.headers))
        if left_out := sum(message.left_out for message in place.new):
            metrics["contents_left_out"] += left_out
        self.limits.opened(request.conversation, new_line=place.parent is None or len(place.parent.children) > 1)
        try:
            context = await self._context(request, place)
            prompt = prompt_behind(place.parent, context)
            room = self.limits.room(len(prompt))
        except BaseException:
            self.end(turn, was_turn=False, delivered=False)
            raise
        return HarnessCall(self, turn, request, context, prompt, room)

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the tokens of a prompt (see `model_proxy.calls.Model.count_tokens`).

        It neither ends the rollout nor uses up a call; one such request per rollout is answered at a time.
        """
        self.limits.check_not_over()
        if self._others.takes(request.model):
            return await self._others.count_tokens(request)
        self.limits.check_request(request)
        async with self._counting:
            place = self.tree.locate(request)
            context = await self._context(request, place)
        return len(prompt_behind(place.parent, context))

    def end(self, turn: Turn, *, was_turn: bool, delivered: bool) -> None:
        if turn.said is None:
            self.policy.episode.metrics["calls_without_reply"] += 1
        self.limits.ended(was_turn=was_turn)
        self.tree.close(turn, delivered=delivered)

    async def finish(self, train_on: Collection[str] = ("all",)) -> None:
        """Write the turns of these kinds to the episode's trajectory; count all turns, and note the tree."""
        kinds = [kind for kind in CallKind if kind.value in train_on or "all" in train_on]
        write_episode(self.policy.episode, self.tree, kinds)
        await self._others.finish()
        if self.parser is not None:
            await self.parser.close()

    async def _context(self, request: ModelRequest, place: Place) -> tuple[Piece, ...]:
        started = time.monotonic()
        tools = request.tools if place.parent is None else ()
        try:
            if text_size(place.new, tools) > LONG_TEXT:
                return await asyncio.to_thread(self._tokenised, request, place)
            return self._tokenised(request, place)
        finally:
            self.policy.episode.spent("chat", started)

    def _tokenised(self, request: ModelRequest, place: Place) -> tuple[Piece, ...]:
        chat, parent = self.policy.chat, place.parent
        try:
            if parent is None:
                return chat.opening([_chat_message(message) for message in place.new], request.tools)
            calls = parent.said.calls if parent.said is not None else ()
            number_of = {call.call_id: str(number) for number, call in enumerate(calls)}
            new = [_chat_message(message, number_of) for message in place.new]
            return chat.following(parent.captured.read, new, request.tools)
        except InvalidJob as error:
            raise CallRefused(Problem.INVALID, error.message) from error


class _EngineTime:
    """The time in which any call is at the engine: concurrent calls count once."""

    def __init__(self) -> None:
        self._before_s, self._calls, self._since = 0.0, 0, 0.0

    @contextmanager
    def counted(self, timings: dict[str, float]) -> Iterator[None]:
        """Count a call that is at the engine."""
        if not self._calls:
            self._since = time.monotonic()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._before_s += time.monotonic() - self._since
            timings["engine"] = self._before_s


@dataclass(slots=True)
class HarnessCall:
    """Implements `model_proxy.calls.OpenCall`."""

    model: HarnessModel
    turn: Turn
    request: ModelRequest
    context: tuple[Piece, ...]
    prompt: NDArray[np.int32]
    room: int
    """Most tokens of the reply."""
    begun: bool = False
    """Whether the call reached the engine."""

    @property
    def turn_id(self) -> str:
        """The id of the coming reply."""
        return self.turn.turn_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def close(self, *, delivered: bool) -> None:
        """Record whether the harness got the whole reply."""
        self.model.end(self.turn, was_turn=self.begun, delivered=delivered)

    async def reply(self) -> ModelReply:
        """Return the policy's turn (see `model_proxy.calls.OpenCall.reply`)."""
        model, policy = self.model, self.model.policy
        sampling = policy.job.sampling
        sampling = msgspec.structs.replace(sampling, stop=(*sampling.stop, *self.request.stop))
        wanted, number = min(self.room, self.request.max_tokens or self.room), self.turn.number
        turn = span("turn", {"prorl.turn": number}, parent=model.traceparent)
        try:
            with turn, model.engine.counted(policy.episode.timings):
                self.begun = True
                generation = await TurnSampler(policy, sampling).sample(
                    self.prompt, wanted, number, rows_behind(self.turn.parent)
                )
            read = await self._read(generation.token_ids)
        except EngineFailed as error:
            if error.fields.get("refused"):  # the request's own fault, so a program cannot end a rollout with it
                raise CallRefused(Problem.INVALID, error.message) from error
            model.failed = error
            raise CallRefused(Problem.FAILED, f"service unavailable: {error.message}") from error
        model.failed = model.limits.too_long = None
        reply = self._made_reply(generation, *_stopped(read, self.request.stop))
        model.tree.replied(self.turn, Said(reply.text, reply.calls), Capture(self.context, generation, read))
        return reply

    async def _read(self, token_ids: NDArray[np.int32]) -> ReadTurn:
        chat, parser = self.model.policy.chat, self.model.parser
        tools = self.request.tools if self.request.may_call else ()
        if parser is None:
            read = chat.read_turn(token_ids, tools)
        else:
            started = time.monotonic()
            try:
                read = await parser.read_turn(self.prompt, token_ids, tools)
            finally:
                self.model.policy.episode.spent("parser", started)
            if read.calls and not tools:
                read = chat.read_turn(token_ids, tools)
        # Without tools, what looks like a call is text, which the program may parse itself.
        return read if tools else read._replace(content=read.text, calls=())

    def _made_reply(self, generation: Generation, read: ReadTurn, stopped_by: str) -> ModelReply:
        metrics, token_ids = self.model.policy.episode.metrics, generation.token_ids
        calls: list[ReplyCall] = []
        for number, one in enumerate(read.calls):
            metrics["tool_calls" if isinstance(one, ToolCall) else "malformed_tool_calls"] += 1
            if one.name:
                written = one.arguments
                arguments = written if isinstance(written, str) else msgspec.json.encode(written).decode()
                calls.append(ReplyCall(f"call_{self.turn_id}_{number}", one.name, arguments))
        finish: FinishReason = "tool_calls" if calls else "stop"
        reasoning_tokens = self._reasoning_tokens(read.reasoning, token_ids) if read.reasoning else 0
        return ModelReply(
            turn_id=self.turn_id,
            # A malformed call that names no tool stays text: the harness sees the policy's own words.
            text=read.content if len(calls) == len(read.calls) else read.text,
            reasoning=read.reasoning or "",
            calls=tuple(calls),
            finish_reason="length" if generation.finish_reason == "length" else finish,
            usage=Usage(len(self.prompt), generation.cached_tokens, len(token_ids), reasoning_tokens),
            prompt_token_ids=self.prompt,
            token_ids=token_ids,
            logprobs=generation.logprobs,
            stopped_by=stopped_by,
        )

    def _reasoning_tokens(self, reasoning: str, token_ids: NDArray[np.int32]) -> int:
        """Return the number of tokens up to the end of the reasoning."""
        decode = self.model.policy.chat.decode
        return bisect_left(range(len(token_ids)), True, key=lambda count: reasoning in decode(token_ids[:count]))


def _stopped(read: ReadTurn, stops: Sequence[str]) -> tuple[ReadTurn, str]:
    """Return a turn cut before the stop text that ended it, and that text; empty: no stop text ended it.

    A turn is cut after the token that completes the first stop text, so that text is the only one.
    """
    reasoning = read.reasoning or ""
    for said in (reasoning, read.text):
        found = min(((at, stop) for stop in stops if (at := said.find(stop)) >= 0), default=None)
        if found is None:
            continue
        before, stop = said[: found[0]], found[1]
        if said is reasoning:
            return read._replace(reasoning=before, text="", content="", calls=()), stop
        return read._replace(text=before, content=read.content[: found[0]]), stop
    return read, ""


def _chat_message(message: RequestMessage, number_of: Mapping[str, str] | None = None) -> ChatMessage:
    calls = tuple(PastCall(call.call_id, call.name, _arguments(call.arguments)) for call in message.calls)
    call_id = message.call_id if number_of is None else number_of.get(message.call_id, message.call_id)
    reasoning = message.reasoning if message.role == Role.ASSISTANT and message.reasoning else None
    return ChatMessage(message.role, message.text, reasoning, calls, call_id)


def _arguments(text: str) -> dict[str, object]:
    """Return arguments as the template expects them: an object, whatever the harness sent."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {"arguments": text}
