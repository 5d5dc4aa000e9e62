"""What answers a harness's calls: prompts of exact token ids, turns from the job's backend, all of it captured.

The prompt of a call is what the engine saw and generated up to the turn that the call continues (`call_tree`), and the
ids of the messages that are new. Nothing that an engine has seen is ever told again. The tree keeps what each turn
added; `write` makes the trajectory of it.

One object per attempt, on the loop of its RUN process: when that ends, the calls fail, and the attempt is another's.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ...data.trajectory import Role
from ...errors import EngineFailed, InvalidJob
from ...inference.chat import ChatMessage, PastCall
from ...inference.tool_calls.call import ToolCall
from ...model_proxy.calls import CallRefused, ModelReply, Problem, ReplyCall, Usage, new_turn_id
from ...system.traces import current_traceparent, span
from ...wire.json_bounds import json_values
from ..agent_loop import LONG_TEXT, UNLIMITED, StopReason
from ..turn_sampler import TurnSampler
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
"""What harnesses are told that the model is called: what some know of a name, such as its window, would not be true."""
CALLS_AT_ONCE = 16
"""Calls of one rollout that are answered at one time."""
CALLS_PER_TURN, FURTHER_CALLS = 20, 200
"""How many calls a rollout may make in all, answered or not: a program may ask for ever, and each costs a look."""
TOKEN_CHARACTERS = 32
"""More than a token has on average in any text: longer requests are refused before anything is made of them."""
TOOLS, STOPS, STOP_CHARACTERS = 512, 16, 256
"""Most tools and texts to stop at of a call, and the longest of the latter."""
ARGUMENT_VALUES = 200_000
"""JSON values of the arguments of all calls in a request's history, where they are texts that are decoded again."""
MESSAGE_CHARACTERS = 32
"""What a message costs besides its text."""
BYTES, BYTES_PER_TURN = 64 * 2**20, 4 * 2**20
"""What a rollout's bodies may cost in all (see `model_proxy.calls.Model.charge`): programs send their whole history
with each call, some hundred kilobytes of it."""
LINES = 100
"""Lines that the calls of a rollout may make, each of which tells its history again in the trajectory."""


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
        self.over = asyncio.Event()
        """Set with the first call that is refused since nothing more will be answered."""
        self.failure: EngineFailed | None = None
        """Why the last call that went to the engine failed, if it did."""
        self.too_long: CallRefused | None = None
        """The last call, if it was refused as too long."""
        self.exceeded = False
        """The programs sent more than a rollout may."""
        self._generate = generate
        self._chat = chat
        self._job = job
        self._episode = episode
        self._hints = hints
        self._parser = parser
        context = context_tokens or UNLIMITED
        limit = job.episode.max_tokens
        self.limit = min(limit, context)
        """Most tokens of a prompt and its answer."""
        self.limited_by = StopReason.MAX_TOKENS if limit <= context else StopReason.CONTEXT_LENGTH
        self._tree = CallTree(prompt)
        self._captured = CapturedTurns(self._tree)
        episode.so_far = self._captured.last_line
        self._in_flight = self._waiting = self._calls = self._lines = self._cost = 0
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
        self._cost += cost
        if self._cost > self.cost_limit:
            self.exceeded = True
            self.over.set()
        if self.over.is_set():
            raise CallRefused(
                Problem.OVER, "the rollout is over: its turns, or the bytes that it may send, are used up"
            )

    @property
    def cost_limit(self) -> int:
        """What all bodies may cost."""
        return BYTES + BYTES_PER_TURN * self._job.episode.max_turns

    async def open(self, request: ModelRequest) -> HarnessCall:
        """Take a call (see `model_proxy.calls.Model.open`)."""
        self._check_call()
        try:
            self._check_request(request)
            return await self._opened(request)
        except CallRefused as refused:
            self._note_too_long(refused)
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
        self._lines += place.parent is None or len(place.parent.children) > 1
        self._in_flight += 1
        self._waiting += 1
        try:
            context = await self._context(request, place)
            prompt = self._captured.prompt(place.parent, context)
            room = self.limit - len(prompt)
            if room < 1:
                raise self._too_long(len(prompt))
        except BaseException:
            self._waiting -= 1
            self._end(turn, delivered=False)
            raise
        return HarnessCall(self, turn, request, context, prompt, room)

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the tokens of a prompt (see `model_proxy.calls.Model.count_tokens`).

        It ends nothing and uses up no call; a rollout has one such request answered at a time.
        """
        if self.over.is_set():
            raise CallRefused(Problem.OVER, "the rollout is over")
        self._check_request(request)
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

    def _check_call(self) -> None:
        """Count a call, and refuse it beyond what a rollout may ask.

        Raises:
            CallRefused: it is.
        """
        self._calls += 1
        max_turns = self._job.episode.max_turns
        # Those that were taken and have not begun will be turns.
        turns = self._episode.metrics["turns"] + self._waiting
        if turns >= max_turns or self._calls > CALLS_PER_TURN * max_turns + FURTHER_CALLS or self._lines > LINES:
            self._episode.stop_reason = StopReason.MAX_TURNS
            self.over.set()
        if self.over.is_set():
            raise CallRefused(Problem.OVER, "the rollout is over: its turns are used up")
        if self._in_flight >= CALLS_AT_ONCE:
            self._episode.metrics["calls_refused_as_too_many"] += 1
            message = f"{CALLS_AT_ONCE} calls of this rollout are being answered; try again later"
            raise CallRefused(Problem.BUSY, message)

    def _check_request(self, request: ModelRequest) -> None:
        """Refuse a request that no engine would take.

        Raises:
            CallRefused: it is.
        """
        stops = STOPS - len(self._job.sampling.stop)
        if len(request.stop) > stops or not all(0 < len(text) <= STOP_CHARACTERS for text in request.stop):
            message = f"stop takes up to {stops} texts of 1 to {STOP_CHARACTERS} characters each"
            raise CallRefused(Problem.INVALID, message)
        if len(request.tools) > TOOLS:
            raise CallRefused(Problem.INVALID, f"there are {len(request.tools)} tools; at most {TOOLS} are taken")
        arguments = [call.arguments for message in request.messages for call in message.calls]
        if sum(map(len, arguments)) > ARGUMENT_VALUES:  # there are no more values than characters
            encoded = (text.encode(errors="replace") for text in arguments)
            if sum(json_values(text, ARGUMENT_VALUES) for text in encoded) > ARGUMENT_VALUES:
                message = f"the calls have arguments of more than {ARGUMENT_VALUES} values, which is the most"
                raise CallRefused(Problem.INVALID, message)
        if (characters := _size(request.messages, request.tools)) > TOKEN_CHARACTERS * self.limit:
            raise self._too_long(characters // TOKEN_CHARACTERS)

    def _too_long(self, tokens: int) -> CallRefused:
        message = f"the prompt has {tokens} tokens, and the limit is {self.limit} with the answer"
        return CallRefused(Problem.CONTEXT_LENGTH, message, tokens=tokens, limit=self.limit)

    def _note_too_long(self, refused: CallRefused) -> None:
        if refused.problem == Problem.CONTEXT_LENGTH:
            self._episode.metrics["calls_refused_as_too_long"] += 1
            self.too_long = refused

    async def _context(self, request: ModelRequest, place: Place) -> tuple[Piece, ...]:
        """Return the ids of what is new."""
        started = time.monotonic()
        told = request.tools if place.parent is None else ()
        try:
            if _size(place.new, told) > LONG_TEXT:
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
        self.failure = self.too_long = None
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
            self._waiting -= 1

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
        self._in_flight -= 1
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


def _size(messages: Sequence[RequestMessage], tools: Sequence[dict[str, Any]]) -> int:
    """Return the characters of all that is told to the policy, roughly."""
    texts = sum(len(message.text) + len(message.reasoning) + MESSAGE_CHARACTERS for message in messages)
    calls = sum(len(call.arguments) for message in messages for call in message.calls)
    return texts + calls + len(msgspec.json.encode(tools))


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
