"""Answers a harness's calls: prompts of exact token ids, turns from the job's backend, all of it captured.

The prompt of a call is what the engine saw and generated up to the turn that the call continues (`call_tree`), and the
ids of the new messages. Text that the engine has seen is never tokenised again. The tree keeps what each turn added;
`write` makes the trajectory of it. `call_limits` has what the calls may ask and cost.

One object per attempt, on the loop of its RUN process: when that ends, the calls fail, and the attempt is another's.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from ...data.trajectory import Role
from ...errors import EngineFailed, InvalidJob
from ...inference.chat import ChatMessage, PastCall
from ...inference.tool_calls.call import ToolCall
from ...model_proxy.calls import CallRefused, ModelReply, Problem, ReplyCall, Usage, new_turn_id
from ...system.traces import current_traceparent, span
from ..agent_loop import LONG_TEXT
from ..turn_sampler import TurnSampler
from .call_limits import CallLimits, text_size
from .call_tree import CallTree, Said
from .captured_turns import Capture, CapturedTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...inference.chat import ChatFormat, Piece, ReadTurn
    from ...inference.engine import Generation, Generator
    from ...inference.http.turn_parser import TurnParser
    from ...model_proxy.calls import FinishReason, ModelRequest, RequestMessage
    from ...wire.messages.jobs import Job
    from ..agent_loop import Episode
    from .adapter import CallHints
    from .call_tree import CallKind, Place, Turn

MODEL = "policy"
"""The model's name for harnesses: what some know of a real name, such as its window, would not be true."""


class HarnessModel:
    """Implements `model_proxy.calls.Model`.

    Args:
        generate: the job's backend.
        chat: of the policy.
        context_tokens: of the engine; 0: not known.
        job: whose sampling and limits hold, whatever a harness asks for.
        episode: its record gets the counts.
        prompt: what the harness is asked to do.
        refusal_status: see `model_proxy.calls.Model`.
        hints: reads the headers of a call.
        parser: reads the policy's turns; None: the chat format does.
    """

    def __init__(
        self,
        generate: Generator,
        chat: ChatFormat,
        context_tokens: int,
        job: Job,
        episode: Episode,
        *,
        prompt: str,
        refusal_status: int,
        hints: Callable[[Mapping[str, str]], CallHints],
        parser: TurnParser | None = None,
    ) -> None:
        self.refusal_status = refusal_status
        self.failure: EngineFailed | None = None
        """Why the last call that went to the engine failed, if it did."""
        self.limits = CallLimits(job, context_tokens, episode)
        self._generate = generate
        self._chat = chat
        self._job = job
        self._episode = episode
        self._hints = hints
        self._parser = parser
        self._tree = CallTree(prompt)
        self._captured = CapturedTurns(self._tree)
        episode.so_far = self._captured.last_line
        self._counting = asyncio.Lock()
        self._traceparent = current_traceparent()
        """Of the phase; the calls come in tasks of the server's."""
        self._engine_s, self._busy, self._busy_since = 0.0, 0, 0.0
        """For how long any call has been at the engine, how many are, and since when."""

    @property
    def name(self) -> str:
        """What the policy is called."""
        return MODEL

    @property
    def answered(self) -> int:
        """Calls that got a reply."""
        return len(self._captured)

    def charge(self, cost: int) -> None:
        """Charge the rollout for a body (see `model_proxy.calls.Model.charge`)."""
        self.limits.charge(cost)

    async def open(self, request: ModelRequest) -> HarnessCall:
        """Take a call (see `model_proxy.calls.Model.open`)."""
        self.limits.check_call()
        try:
            self.limits.check_request(request)
            return await self._opened(request)
        except CallRefused as refused:
            self.limits.note_too_long(refused)
            raise

    async def _opened(self, request: ModelRequest) -> HarnessCall:
        if request.sampling:
            self._episode.metrics["calls_with_own_sampling"] += 1
        if request.model != MODEL:
            self._episode.metrics["calls_of_another_model"] += 1
        place = self._tree.locate(request)
        turn = self._tree.open(new_turn_id(), request, place, self._hints(request.headers))
        if left_out := sum(message.left_out for message in place.new):
            self._episode.metrics["contents_left_out"] += left_out
        self.limits.opened(new_line=place.parent is None or len(place.parent.children) > 1)
        try:
            context = await self._context(request, place)
            prompt = self._captured.prompt(place.parent, context)
            room = self.limits.room(len(prompt))
        except BaseException:
            self.limits.begun()
            self._end(turn, delivered=False)
            raise
        return HarnessCall(self, turn, request, context, prompt, room)

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the tokens of a prompt (see `model_proxy.calls.Model.count_tokens`).

        It ends nothing and uses up no call; a rollout has one such request answered at a time.
        """
        self.limits.check_not_over()
        self.limits.check_request(request)
        async with self._counting:
            place = self._tree.locate(request)
            context = await self._context(request, place)
        return len(self._captured.prompt(place.parent, context))

    def write(self, kinds: Collection[CallKind]) -> None:
        """Write the turns of these kinds to the episode's trajectory; count all, and note the tree."""
        episode = self._episode
        episode.so_far = None
        self._captured.write(episode.trajectory, kinds)
        self._captured.count(episode.metrics)
        episode.notes["calls"] = self._captured.outline()
        episode.last_text = self._captured.last_text()

    async def _context(self, request: ModelRequest, place: Place) -> tuple[Piece, ...]:
        """Return the ids of what is new."""
        started = time.monotonic()
        tools = request.tools if place.parent is None else ()
        try:
            if text_size(place.new, tools) > LONG_TEXT:
                return await asyncio.to_thread(self._tokenised, request, place)
            return self._tokenised(request, place)
        finally:
            self._episode.spent("chat", started)

    def _tokenised(self, request: ModelRequest, place: Place) -> tuple[Piece, ...]:
        try:
            if place.parent is None:
                return self._chat.opening([_chat_message(message) for message in place.new], request.tools)
            number_of = {call_id: str(number) for number, call_id in enumerate(_call_ids(place.parent))}
            new = [_chat_message(message, number_of) for message in place.new]
            return self._chat.following(self._captured[place.parent].read, new, request.tools)
        except InvalidJob as error:
            raise CallRefused(Problem.INVALID, error.message) from error

    async def answer(self, call: HarnessCall) -> ModelReply:
        """Have the engine answer a call."""
        job, asked = self._job, call.request.max_tokens
        sampling = msgspec.structs.replace(job.sampling, stop=(*job.sampling.stop, *call.request.stop))
        sampler = TurnSampler(self._generate, self._chat, sampling, self._episode)
        turn = span("turn", {"prorl.turn": call.turn.number}, parent=self._traceparent)
        try:
            with turn, self._at_the_engine(call):
                generation = await sampler.sample(call.prompt, min(call.room, asked or call.room), call.turn.number)
            read = await self._read(call, generation.token_ids)
        except EngineFailed as error:
            if error.fields.get("refused"):  # the request's own fault, so nothing that a program may end a rollout with
                raise CallRefused(Problem.INVALID, error.message) from error
            self.failure = error
            raise CallRefused(Problem.FAILED, f"service unavailable: {error.message}") from error
        self.failure = self.limits.too_long = None
        self._captured.add(call.turn, Capture(call.context, generation, read))
        reply = self._made_reply(call, generation, *_stopped(read, call.request.stop))
        self._tree.replied(call.turn, Said(reply.text, reply.calls))
        return reply

    @contextmanager
    def _at_the_engine(self, call: HarnessCall) -> Iterator[None]:
        """Count the turn, and the time in which any call is at the engine: calls beside each other take it once."""
        self._begin(call)
        if not self._busy:
            self._busy_since = time.monotonic()
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._engine_s += time.monotonic() - self._busy_since
            self._episode.timings["engine"] = self._engine_s

    def _begin(self, call: HarnessCall) -> None:
        if not call.begun:
            call.begun = True
            self.limits.begun()

    async def _read(self, call: HarnessCall, token_ids: NDArray[np.int32]) -> ReadTurn:
        request = call.request
        tools = request.tools if request.may_call else ()
        if self._parser is None:
            read = self._chat.read_turn(token_ids, tools)
        else:
            started = time.monotonic()
            try:
                read = await self._parser.read_turn(call.prompt, token_ids, tools)
            finally:
                self._episode.spent("parser", started)
            if read.calls and not tools:
                read = self._chat.read_turn(token_ids, tools)
        # Where nothing may be called, what looks like a call is text, and the program may well read it itself.
        return read if tools else read._replace(content=read.text, calls=())

    def _made_reply(self, call: HarnessCall, generation: Generation, read: ReadTurn, stopped_by: str) -> ModelReply:
        metrics = self._episode.metrics
        calls: list[ReplyCall] = []
        for number, one in enumerate(read.calls):
            metrics["tool_calls" if isinstance(one, ToolCall) else "malformed_tool_calls"] += 1
            if one.name:
                arguments = (
                    one.arguments if isinstance(one.arguments, str) else msgspec.json.encode(one.arguments).decode()
                )
                calls.append(ReplyCall(f"call_{call.turn_id}_{number}", one.name, arguments))
        finish: FinishReason = "tool_calls" if calls else "stop"
        return ModelReply(
            call.turn_id,
            # What was meant as a call and names no tool stays text: the harness sees what the policy said.
            read.content if len(calls) == len(read.calls) else read.text,
            read.reasoning or "",
            tuple(calls),
            "length" if generation.finish_reason == "length" else finish,
            Usage(
                len(call.prompt),
                generation.cached_tokens,
                len(generation.token_ids),
                self._reasoning_tokens(read.reasoning, generation.token_ids) if read.reasoning else 0,
            ),
            call.prompt,
            generation.token_ids,
            generation.logprobs,
            stopped_by,
        )

    def _reasoning_tokens(self, reasoning: str, token_ids: NDArray[np.int32]) -> int:
        """Return after how many tokens the reasoning has been said."""
        return bisect_left(range(len(token_ids)), True, key=lambda n: reasoning in self._chat.decode(token_ids[:n]))

    def end(self, call: HarnessCall, *, delivered: bool) -> None:
        """Note that a call is over."""
        self._begin(call)
        self._end(call.turn, delivered=delivered)

    def _end(self, turn: Turn, *, delivered: bool) -> None:
        if turn.said is None:
            self._episode.metrics["calls_without_reply"] += 1
        self.limits.ended()
        self._tree.close(turn, delivered=delivered)


class HarnessCall:
    """Implements `model_proxy.calls.OpenCall`."""

    def __init__(
        self,
        model: HarnessModel,
        turn: Turn,
        request: ModelRequest,
        context: tuple[Piece, ...],
        prompt: NDArray[np.int32],
        room: int,
    ) -> None:
        self.turn = turn
        self.request = request
        self.context = context
        self.prompt = prompt
        self.room = room
        self.begun = False
        """It is a turn."""
        self._model = model

    @property
    def turn_id(self) -> str:
        """Of the reply that will come."""
        return self.turn.turn_id

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt."""
        return len(self.prompt)

    async def reply(self) -> ModelReply:
        """Return the policy's turn (see `model_proxy.calls.OpenCall.reply`)."""
        return await self._model.answer(self)

    def close(self, *, delivered: bool) -> None:
        """Say whether the harness got the whole reply."""
        self._model.end(self, delivered=delivered)


def _stopped(read: ReadTurn, stops: Sequence[str]) -> tuple[ReadTurn, str]:
    """Return a turn without the text that ended it and what follows that, and the text; empty: it ended by itself.

    A turn is cut behind the token that completes the first such text, so that text is the only one.
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


def _call_ids(turn: Turn) -> Sequence[str]:
    return [call.call_id for call in turn.said.calls] if turn.said is not None else ()


def _chat_message(message: RequestMessage, number_of: Mapping[str, str] | None = None) -> ChatMessage:
    calls = tuple(PastCall(call.call_id, call.name, _arguments(call.arguments)) for call in message.calls)
    call_id = message.call_id if number_of is None else number_of.get(message.call_id, message.call_id)
    reasoning = message.reasoning if message.role == Role.ASSISTANT and message.reasoning else None
    return ChatMessage(message.role, message.text, reasoning, calls, call_id)


def _arguments(text: str) -> dict[str, object]:
    """Return arguments as a template takes them: an object, whatever the harness made of them."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {"arguments": text}
