"""`Conversation`: one conversation of RUN with a model, turn by turn. Token ids in, token ids out.

Only new messages are tokenised; generated ids are appended unchanged. If the chat template rewrites earlier turns, the
next prompt begins a new segment of the trajectory.
"""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.records import part_of
from ..data.rows import TRUNCATING
from ..data.trajectory import Role
from ..data.trajectory_builder import TrajectoryBuilder
from ..errors import HandlerFailed, InvalidJob
from ..inference.chat import ChatMessage
from ..inference.tool_calls.call import MalformedCall, ToolCall
from ..metrics.catalog import TOOL_SECONDS
from ..system.traces import span
from ..tools.tool import AnyTool, ToolArgumentsInvalid
from ..wire.messages.jobs import MAIN
from .cut_text import cut_text
from .episode import UNLIMITED, ConversationRecord, StopReason, Turn
from .turn_sampler import TurnSampler, rows_of_experts, version_per_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence

    from ..inference import chat
    from ..inference.chat import Prompt
    from ..inference.engine import Generation
    from .episode import Episode, JobPolicy

LONG_TEXT = 32 * 1024
"""Characters from which on a text is tokenised in a thread."""
NAMES_LIMIT = 2000
"""Most characters of the tools' names in the answer to a call of another one."""
SEEDS_APART = 10_007
"""Between the turn numbers of two conversations, from which the turns' seeds are made."""


class _Budget(NamedTuple):
    """The tokens that still fit, and the limit that they end at."""

    tokens: int
    limit: StopReason


def checked_messages(messages: Any) -> list[ChatMessage]:
    """Check messages that a handler passes on.

    Raises:
        TypeError: a value has the wrong type.
    """
    if isinstance(messages, str | ChatMessage):
        raise TypeError(f"messages must be a list, such as [ChatMessage(Role.USER, …)], and not {messages!r:.100}")
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise TypeError(f"a message must be a ChatMessage(Role.USER, …), and not {message!r:.100}")
        if not isinstance(message.role, Role):
            raise TypeError(f"a message's role must be a prorl_zmq.Role, such as Role.USER, and not {message.role!r}")
        if not isinstance(message.content, str):
            raise TypeError(f"a message's content must be a text, and not {message.content!r:.100}")
    return list(messages)


def checked_tools(tools: Any) -> dict[str, AnyTool]:
    """Return the tools that a handler passes on, by name.

    Raises:
        TypeError: a value has the wrong type.
    """
    for tool in tools:
        if isinstance(tool, type) or not isinstance(tool, AnyTool):
            raise TypeError(f"a tool must be an object of a class derived from Tool, and not {tool!r:.100}")
    return {tool.name: tool for tool in tools}


class Conversation(ConversationRecord):
    """One conversation of RUN with a model; `RunPhase.conversation` begins it.

    Messages are sent with the turn that answers them. Messages that no longer fit are not sent: `Turn.stop` names the
    limit, and the conversation has ended. A conversation takes one call at a time; several may run at once.
    """

    def __init__(
        self,
        episode: Episode,
        policy: Callable[[], Awaitable[JobPolicy]],
        opening: Sequence[ChatMessage],
        tools: Sequence[AnyTool] = (),
        *,
        name: str = MAIN,
        trained: bool = True,
        model: str = "",
    ) -> None:
        first = trained and not any(other.trained for other in episode.conversations)
        super().__init__(name, trained, episode.trajectory if first else TrajectoryBuilder(), model)
        self._number = len(episode.conversations)
        self._episode = episode
        self._counts = episode if trained else episode.apart()
        self._get_policy = policy
        self._policy: JobPolicy | None = None
        self._coming = checked_messages(opening)
        self._tools: MutableMapping[str, AnyTool] = checked_tools(tools)
        self._chat: chat.Conversation | None = None
        self._busy = False
        self._finished = False
        """A tool has ended it."""
        episode.conversations.append(self)

    async def say(self, message: str | Sequence[ChatMessage] = ()) -> Turn:
        """Say something to the model, and answer its tool calls until a turn has none. Return that turn.

        Args:
            message: the user's text, or messages; none: the model answers the opening.

        Raises:
            HandlerFailed: the conversation has ended, or another call is under way.
            InvalidJob: the opening leaves no room, or the chat template rejects the messages.
            EngineFailed: the engine failed.
        """
        self._check_free("say")
        messages = self._messages(message)
        with self._under_way():
            turn, results = await self._next(messages, answered=True)
            while results:
                turn, results = await self._next([], results, after=turn, answered=True)
            return turn

    async def turn(self, *messages: ChatMessage) -> Turn:
        """Take one turn of the model. Its calls stay unanswered: answer all of them with the next turn's messages.

        Args:
            messages: the answers to the last turn's calls (`Role.TOOL`, one for each call, in order), then others.

        Raises:
            HandlerFailed: as `say`, or the answers are not as many as the calls.
            InvalidJob, EngineFailed: as `say`.
        """
        self._check_free("turn")
        given = checked_messages(messages)
        answers = [message.content for message in given if message.role == Role.TOOL] if self.turns else []
        if len(answers) != self._unanswered:
            raise HandlerFailed(
                f"conversation {self.name!r}: the last turn has {self._unanswered} tool calls, and {len(answers)} "
                "answers were given: pass one ChatMessage(Role.TOOL, …) for each call, in order"
            )
        with self._under_way():
            said = [one for one in given if not self.turns or one.role != Role.TOOL]
            return (await self._next(said, answers))[0]

    def end(self) -> None:
        """End the conversation, since the world that the model acts in has ended: stop reason `environment`."""
        if self.stop is None:
            self.stop = StopReason.ENVIRONMENT
            self._note_stop()

    @property
    def _unanswered(self) -> int:
        """How many tool calls of the last turn have no answer yet."""
        return len(self.turns[-1].calls) if self.turns else 0

    def _check_free(self, what: str) -> None:
        if self._episode.is_over:
            raise HandlerFailed(f"conversation {self.name!r}: `{what}` was called after RUN had ended")
        if self._busy:
            raise HandlerFailed(f"conversation {self.name!r}: `{what}` was called while another call is under way")
        if self.stop is not None:
            raise HandlerFailed(
                f"conversation {self.name!r} has ended ({self.stop}), so nothing more can be said; look at `turn.stop`"
            )
        if self.failed:
            raise HandlerFailed(f"conversation {self.name!r}: an earlier call failed, so nothing more can be said")

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        self._busy = self.failed = True
        self.task = asyncio.current_task()
        self._note_stop()
        try:
            yield
            self.failed = False
        finally:
            self._busy, self.task = False, None
        self._note_stop()

    def _note_stop(self) -> None:
        if self.trained:
            limited = (one.stop for one in self._episode.conversations if one.trained and one.stop in TRUNCATING)
            self._episode.stop_reason = next(limited, None) or self.stop_reason

    def _messages(self, message: str | Sequence[ChatMessage]) -> list[ChatMessage]:
        if self._unanswered:
            raise HandlerFailed(
                f"conversation {self.name!r}: the last turn has {self._unanswered} unanswered tool calls; answer them "
                "with `turn`"
            )
        if isinstance(message, str):
            return [ChatMessage(Role.USER, message)]
        if not message and self.turns:
            raise HandlerFailed(f"conversation {self.name!r}: `say` needs a message, since the model spoke last")
        messages = checked_messages(message)
        if any(one.role == Role.TOOL for one in messages) and self.turns:
            raise HandlerFailed(f"conversation {self.name!r}: `say` answers tool calls itself; use `turn`")
        return messages

    async def _next(
        self,
        messages: list[ChatMessage],
        results: Sequence[str] = (),
        after: Turn | None = None,
        *,
        answered: bool = False,
    ) -> tuple[Turn, Sequence[str]]:
        """Take a turn after answers to the last turn's calls, and messages.

        Return it, or `after` if a limit leaves no room for another; and, if `answered`, the answers to its calls.
        """
        limits = (await self._opened(messages, results)).job.episode
        if self._counts.turns_begun >= limits.max_turns:
            return self._end(after or Turn(), StopReason.MAX_TURNS), ()
        self._counts.turns_begun += 1
        before = len(self.turns)
        with span("turn", {"prorl.turn": len(self.turns)}):
            turn = await self._sampled(sum(map(len, results)) + sum(len(one.content) for one in messages), after)
            if len(self.turns) == before:
                self._counts.turns_begun -= 1
                return turn, ()
            if not answered or turn.stop is not None or not turn.calls:
                return turn, ()
            answers = await self._results(turn.calls)
        return (turn, answers) if answers is not None else (self._end(turn, StopReason.FINISHED), ())

    async def _opened(self, messages: list[ChatMessage], results: Sequence[str]) -> JobPolicy:
        """Add the next messages to the chat; return the policy."""
        if not self.trained:
            self.transcript += self._coming if self._chat is None else ()
            self.transcript += [*(ChatMessage(Role.TOOL, text) for text in results), *messages]
        if self._chat is not None and self._policy is not None:
            if results:
                self._chat.add_tool_results(results)
            if messages:
                self._chat.add_messages(messages)
            return self._policy
        if not (self._coming or messages):
            raise HandlerFailed(f"conversation {self.name!r} has no message that the model could answer")
        policy = await self._get_policy()
        if self.model or not self.trained:
            policy = replace(policy, episode=self._counts)
        self._policy, self.logprobs_mode = policy, policy.logprobs_mode
        if policy.more_tools is not None and self.trained:
            self._tools = ChainMap(self._tools, policy.more_tools)
        self._chat = policy.chat.conversation(
            [*self._coming, *messages], [tool.schema() for tool in self._tools.values()]
        )
        return policy

    async def _sampled(self, new: int, after: Turn | None) -> Turn:
        policy, chat = self._policy, self._chat
        assert policy is not None, "the conversation is open"
        assert chat is not None, "the conversation is open"
        if not self.turns:
            new += sum(len(message.content) for message in self._coming)
        started = time.monotonic()
        # Tokenising megabytes takes seconds, which would block the event loop.
        prompt = await asyncio.to_thread(chat.prompt) if new > LONG_TEXT else chat.prompt()
        room = self._add(prompt, policy)
        self._episode.spent("chat", started)
        if room.tokens < 1:
            if not self.turns:
                raise self._no_room(prompt, room, policy)
            return self._end(after or Turn(), room.limit)
        number = SEEDS_APART * self._number + len(self.turns)
        sampler = TurnSampler(policy, policy.job.sampling)
        rows = self.trajectory.rows_known
        take = partial(self._append, rows)
        generation = await sampler.sample(self.trajectory.prompt(), room.tokens, number, rows, take)
        started = time.monotonic()
        read = chat.add_turn(generation.token_ids)
        if self.trained:
            self._episode.last_text = read.text
        else:
            self.transcript.append(ChatMessage(Role.ASSISTANT, read.text, read.reasoning))
        self._episode.spent("chat", started)
        turn = Turn(read, self.trajectory.turns - 1 if self.trained and len(generation.token_ids) else None)
        self.turns.append(turn)
        stop = _stop_reason(generation, room, policy)
        return turn if stop is None else self._end(turn, stop)

    def _end(self, turn: Turn, stop: StopReason) -> Turn:
        self.stop = turn.stop = stop
        return turn

    def _add(self, prompt: Prompt, policy: JobPolicy) -> _Budget:
        """Append a prompt if that leaves room for a token of the policy; return that budget."""
        before = 0 if prompt.rewritten else self.trajectory.segment_tokens
        room = _budget(before + sum(len(piece.token_ids) for piece in prompt.pieces), policy)
        if room.tokens > 0:
            if prompt.rewritten:
                self.trajectory.begin_segment()
            for piece in prompt.pieces:
                if piece.new_turn:
                    self.trajectory.begin_turn(piece.role)
                self.trajectory.add_context(piece.token_ids)
        return room

    def _no_room(self, prompt: Prompt, room: _Budget, policy: JobPolicy) -> InvalidJob:
        tokens = sum(len(piece.token_ids) for piece in prompt.pieces)
        if room.limit == StopReason.MAX_TOKENS:
            what, name = f"episode.max_tokens ({policy.job.episode.max_tokens})", "episode.max_tokens"
        else:
            what, name = f"the engine's context ({policy.context_tokens} tokens)", "messages"
        return InvalidJob(f"the opening messages, {tokens} tokens, leave no room in {what}", field=name)

    def _append(self, rows_before: int, turn_so_far: Generation, start: int) -> None:
        versions = version_per_token(turn_so_far)
        ids, logprobs = turn_so_far.token_ids[start:], turn_so_far.logprobs[start:]
        self.trajectory.add_generated(ids, logprobs, versions[start:])
        if records := turn_so_far.records:
            first_row = self.trajectory.rows_known - rows_before
            self.trajectory.add_records(part_of(records, start, len(versions), first_row, rows_of_experts(turn_so_far)))

    async def _results(self, calls: Sequence[ToolCall | MalformedCall]) -> list[str] | None:
        """Answer a turn's tool calls; return None if one of them ended the conversation."""
        results: list[str] = []
        for call in calls:
            results.append(await self._answer(call))
            if self._finished:
                return None
        return results

    async def _answer(self, call: ToolCall | MalformedCall) -> str:
        metrics = self._counts.metrics
        if isinstance(call, MalformedCall):
            metrics["malformed_tool_calls"] += 1
            return call.feedback
        metrics["tool_calls"] += 1
        tool = self._tools.get(call.name)
        if tool is None:
            metrics["malformed_tool_calls"] += 1
            names = cut_text(", ".join(self._tools), NAMES_LIMIT)
            return f"There is no tool {call.name!r}. The tools are: {names}."
        assert self._policy is not None, "the conversation is open"
        started = time.monotonic()
        try:
            with span(
                f"execute_tool {call.name}", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name}
            ):
                text = await tool(call.arguments, self._policy.job.episode.tool_call_s)
        except ToolArgumentsInvalid as error:
            metrics["invalid_tool_arguments"] += 1
            return str(error)
        finally:
            self._episode.spent(f"tool.{call.name}", started)
            TOOL_SECONDS.observe(time.monotonic() - started, call.name)
        if tool.ends_episode:
            self._finished = True
            if self.trained:
                self._episode.final_message = text
        return text


def _budget(tokens: int, policy: JobPolicy) -> _Budget:
    """Return what still fits after `tokens` tokens of a segment."""
    context_tokens, max_tokens = policy.context_tokens or UNLIMITED, policy.job.episode.max_tokens
    if max_tokens <= context_tokens:
        return _Budget(max_tokens - tokens, StopReason.MAX_TOKENS)
    return _Budget(context_tokens - tokens, StopReason.CONTEXT_LENGTH)


def _stop_reason(generation: Generation, room: _Budget, policy: JobPolicy) -> StopReason | None:
    """Return the limit that a turn reached; None: none."""
    if generation.finish_reason != "length":
        return None
    if len(generation.token_ids) >= room.tokens:
        return room.limit
    full = len(generation.token_ids) >= policy.job.sampling.max_tokens
    return StopReason.TURN_LENGTH if full else StopReason.CONTEXT_LENGTH
