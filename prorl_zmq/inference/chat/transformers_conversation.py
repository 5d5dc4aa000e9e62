"""One conversation by a chat template (see `transformers_chat`).

The ends of messages in a rendered conversation are found by rendering its beginnings. Rendering all of them would take
quadratic time, so `RENDERED_BEGINNINGS` are rendered; later messages are found by the template's text around earlier
ones of their role, and a message without that text is one piece with the next.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ...data.trajectory import Role
from ...errors import InvalidJob
from ..tool_calls.call import MalformedCall, ToolCall
from . import ChatMessage, Piece, Prompt, ReadTurn
from .forms import forms
from .history import UNKNOWN_TOOL, History, history
from .skeleton import RENDERED_BEGINNINGS, ChatSkeleton, Shape, TurnShape
from .template import TemplateRefused, marker, marker_tool
from .traits import WrittenCall, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .chat_tokenizer import ChatTokenizer
    from .template import ChatTemplate, Message
    from .traits import TemplateTraits


@dataclass(frozen=True, slots=True)
class _Turn:
    """The parts of a policy's turn that later prompts need."""

    text: str
    """Without its reasoning."""
    reasoning: str | None
    calls: tuple[ToolCall | MalformedCall, ...]
    call_ids: tuple[str, ...]
    shape: TurnShape
    ended_by: str
    """The token that ended it; empty: it was cut off."""
    results: tuple[str, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    """Those that follow it and the answers to its calls."""

    def answered(self) -> list[WrittenCall]:
        return [WrittenCall(name, {}, call_id) for name, call_id in zip(self.shape.calls, self.call_ids, strict=True)]

    def following(self) -> list[ChatMessage]:
        """Return the answers to its calls, which name them by their number, and the messages after these."""
        answers = (ChatMessage(Role.TOOL, result, call_id=str(n)) for n, result in enumerate(self.results))
        return [*answers, *self.messages]

    def written(self, messages: Sequence[ChatMessage], traits: TemplateTraits) -> History:
        """Return a form of `following` as the template takes it."""
        return history(messages, traits, {str(n): call for n, call in enumerate(self.answered())})


class _End(NamedTuple):
    """The position in a rendered conversation where a message ends."""

    length: int
    """Of the text up to there."""
    role: Role
    messages: int
    """Messages up to there."""


class TemplateParts:
    """The state that the conversations of one chat format share.

    Args:
        template: of the model.
        traits: of the template.
        tokenizer: of the model.
        stop_token_ids: those of the tokenizer, of `generation_config.json`, and of the template after a turn.
        rewrites: whether the prompt follows the template where it changes what the engine saw.
    """

    def __init__(
        self,
        template: ChatTemplate,
        traits: TemplateTraits,
        tokenizer: ChatTokenizer,
        stop_token_ids: tuple[int, ...],
        *,
        rewrites: bool,
    ) -> None:
        self.template = template
        self.traits = traits
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.rewrites = rewrites
        self.skeleton = ChatSkeleton(template, traits)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text that is no message, int32 [N] (see `chat.ChatFormat.encode`)."""
        return self.tokenizer.plain(text)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        return self.tokenizer.decode(token_ids)

    def decode_turn(self, generated: NDArray[np.int32]) -> tuple[str, str]:
        """Return the text of a turn, and the token that ended it; empty: it was cut off.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """
        ended = len(generated) > 0 and int(generated[-1]) in self.stop_token_ids
        if not ended:
            return self.decode(generated), ""
        return self.decode(generated[:-1]), self.decode(generated[-1:])

    def pieces_after(
        self,
        roles: Sequence[str],
        shape: TurnShape,
        call_ids: Sequence[str],
        told: History,
        tools: Sequence[dict[str, Any]],
        *,
        ended_by: str,
        calls_before: int,
    ) -> tuple[Piece, ...]:
        """Return the ids that follow a turn; see `ChatSkeleton.following`."""
        (messages, tools), cut = self.tokenizer.guard((told.messages, list(tools)))
        text, boundaries = self.skeleton.following(
            roles, shape, call_ids, messages, tools, ended_by=ended_by, calls_before=calls_before
        )
        closing, *new, opening = self.tokenizer.encode(text, boundaries, cut, ended_by, inside=True)
        pieces = [Piece(Role.ASSISTANT, closing, new_turn=False)]
        pieces += [Piece(role, ids) for role, ids in zip(told.roles, new, strict=True)]
        return (*(piece for piece in pieces if len(piece.token_ids)), Piece(Role.ASSISTANT, opening))


class TransformersConversation:
    """Implements `chat.Conversation`."""

    def __init__(
        self,
        chat: TemplateParts,
        opening: Sequence[Message],
        roles: Sequence[Role],
        shown: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
    ) -> None:
        self._chat = chat
        self._traits = chat.traits
        self._opening = list(opening)
        self._roles = list(roles)
        self._shown = list(shown)
        """The tools that the template gets."""
        self._tools = list(tools)
        self._tool_names = frozenset(str(tool.get("function", tool).get("name", "")) for tool in tools)
        self._turns: list[_Turn] = []
        """All of them if the template may rewrite them; otherwise the last."""
        self._calls = 0
        self._last_whole: tuple[str, list[_End]] = ("", [])
        """The text of the last whole rendering, and where its messages end."""

    def prompt(self) -> Prompt:
        try:
            if not self._turns:
                return Prompt(self._whole(self._opening, self._roles))
            if self._is_rewritten() and self._chat.rewrites:
                with suppress(TemplateRefused):  # such as of an unreadable call: the text that the engine saw stays
                    return Prompt(self._whole(*self._history()), rewritten=True)
            return Prompt(self._continuation())
        except TemplateRefused as error:
            message = f"the model's chat template refuses the conversation: {error}"
            raise InvalidJob(message, field="messages") from error

    def add_turn(self, generated: NDArray[np.int32]) -> ReadTurn:
        whole, ended_by = self._chat.decode_turn(generated)
        reasoning, text = self._traits.split(whole)
        calls = tuple(self._traits.calls(text, ended_by, self._tools))
        content = self._traits.before_calls(text)
        if calls and not self._tools:
            calls, content = (), self._traits.said(text)
        names = tuple(self._name(call) for call in calls)
        turn = _Turn(
            text,
            reasoning,
            calls,
            self._ids(calls),
            TurnShape(reasoning is not None, names, self._traits.writes_calls),
            ended_by,
        )
        if not self._chat.rewrites:
            self._turns.clear()
        self._turns.append(turn)
        return ReadTurn(reasoning, text, content, calls, bool(ended_by), ended_by)

    def add_tool_results(self, results: Sequence[str]) -> None:
        turn = self._turns[-1]
        if len(results) != len(turn.calls):
            raise ValueError(f"{len(turn.calls)} calls, {len(results)} answers")
        self._turns[-1] = replace(turn, results=tuple(results))

    def add_messages(self, messages: Sequence[ChatMessage]) -> None:
        turn = self._turns[-1]
        said = (*turn.messages, *messages)
        roles = tuple(message["role"] for message in history(said, self._traits).messages)
        self._turns[-1] = replace(turn, messages=said, shape=turn.shape._replace(after=roles))

    def _name(self, call: ToolCall | MalformedCall) -> str:
        return call.name if isinstance(call, ToolCall) and call.name in self._tool_names else UNKNOWN_TOOL

    def _ids(self, calls: Sequence[ToolCall | MalformedCall]) -> tuple[str, ...]:
        """Return the ids that answers name: the policy's own, if it is one, or else a generated number."""
        ids: list[str] = []
        for call in calls:
            self._calls += 1
            own = call.call_id if isinstance(call, ToolCall) else ""
            ids.append(self._traits.call_id(self._calls, self._name(call), own))
        return tuple(ids)

    def _is_rewritten(self) -> bool:
        """Return whether the template changes what was seen.

        Calls that it rejects, such as a second one in a turn, become text; messages that it rejects after the turn,
        such as the user's after a tool's answer, get another form, which cannot change what was seen.
        """
        turn = self._turns[-1]
        shape = turn.shape
        for tried in dict.fromkeys((shape, shape._replace(written=False), shape._replace(after=()))):
            self._turns[-1] = replace(turn, shape=tried)
            with suppress(TemplateRefused):
                return self._chat.skeleton.rewrites(self._shape())
        self._turns[-1] = replace(turn, shape=shape._replace(written=False, after=()))
        return self._chat.skeleton.rewrites(self._shape())

    def _continuation(self) -> tuple[Piece, ...]:
        turn = self._turns[-1]
        refused: TemplateRefused | None = None
        for form in forms(turn.following(), self._traits.form.write):
            try:
                return self._chat.pieces_after(
                    [message["role"] for message in self._opening],
                    turn.shape,
                    turn.call_ids,
                    turn.written(form, self._traits),
                    # A template may describe the tools in the user's last message.
                    self._shown if turn.messages else [marker_tool()] if self._shown else [],
                    ended_by=turn.ended_by,
                    calls_before=self._calls - len(turn.calls),
                )
            except TemplateRefused as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _shape(self) -> Shape:
        roles = tuple(message["role"] for message in self._opening)
        turns = self._turns[-2:]
        if turns[-1].shape.after and not turns[0].shape.reasoning:
            # A message of the user may end the reasoning of any turn before it.
            turns = next(([turn] for turn in reversed(self._turns[:-2]) if turn.shape.reasoning), []) + turns
        return Shape(roles, bool(self._shown), tuple(turn.shape for turn in turns))

    def _history(self) -> tuple[list[Message], list[Role]]:
        """Return the whole conversation as messages, with their roles."""
        messages, roles = list(self._opening), list(self._roles)
        for turn in self._turns:
            content, calls = self._traits.said(turn.text), []
            if turn.shape.written and all(isinstance(call, ToolCall) for call in turn.calls):
                content = self._traits.before_calls(turn.text)
                calls = [
                    WrittenCall(call.name, call.arguments, call_id)
                    for call, call_id in zip(turn.calls, turn.call_ids, strict=True)
                    if isinstance(call, ToolCall)
                ]
            reasoning = None if turn.reasoning is None else turn.reasoning.strip("\n")
            following = turn.written(turn.following(), self._traits)
            messages += [self._traits.turn(content.strip("\n"), reasoning, calls), *following.messages]
            roles += [Role.ASSISTANT, *following.roles]
        return messages, roles

    def _whole(self, messages: Sequence[Message], roles: Sequence[Role]) -> tuple[Piece, ...]:
        """Return the pieces of a whole conversation, one for each message where the template allows it."""
        template, tokenizer = self._chat.template, self._chat.tokenizer
        (messages, tools), cut = tokenizer.guard((list(messages), self._shown))
        text = template.render(messages, tools, opened=True)
        ends = self._known_ends(text)
        front = self._front(messages, tools, text) if not ends and roles[0] != Role.SYSTEM else 0
        if front:
            ends.append(_End(front, Role.SYSTEM, 0))
        known = ends[-1].messages if ends else 0
        for number in range(known + 1, min(known + RENDERED_BEGINNINGS, len(roles)) + 1):
            start, length = ends[-1].length if ends else 0, template.length_in(text, messages[:number], tools)
            # A message that the template writes with a later one has no text yet, only the token that begins all.
            if length > start and (start or tokenizer.without_tokens(text[:length]).strip()):
                ends.append(_End(length, roles[number - 1], number))
        if len(roles) > known + RENDERED_BEGINNINGS:
            self._add_ends_alike(text, messages, tools, roles, ends)
        self._last_whole = text, ends
        *contents, opening = tokenizer.encode(text, [end.length for end in ends], cut)
        pieces = [Piece(end.role, ids) for end, ids in zip(ends, contents, strict=True)]
        return (*(piece for piece in pieces if len(piece.token_ids)), Piece(Role.ASSISTANT, opening))

    def _known_ends(self, text: str) -> list[_End]:
        """Return the ends of the last rendering that still hold, so that only new text is examined."""
        before, ends = self._last_whole
        changed = bisect_right(ends, 0, key=lambda end: not text.startswith(before[: end.length]))
        return ends[:changed]

    def _add_ends_alike(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any], roles: Sequence[Role], ends: list[_End]
    ) -> None:
        """Add the ends of messages between the template's text around their role's last message and the text's end."""
        frames: dict[Role, tuple[str, str]] = {}
        for one, end in pairwise(ends):
            content = text_of(messages[end.messages - 1]).strip()
            written = text[one.length : end.length]
            if end.messages == one.messages + 1 and content and written.count(content) == 1:
                before, _, after = written.partition(content)
                frames[end.role] = before, after
        start = ends[-1].length if ends else 0
        for number in range(ends[-1].messages if ends else 0, len(roles)):
            frame = frames.get(roles[number])
            written = text_of(messages[number])
            lengths = (
                len(frame[0]) + len(content) + len(frame[1])
                for content in (written, written.strip())
                if frame and text.startswith(f"{frame[0]}{content}{frame[1]}", start)
            )
            length = next(lengths, 0)
            following = frames.get(roles[number + 1], ("", "")) if number + 1 < len(roles) else ("", "")
            if not length or not text.startswith(following[0], start + length):
                break
            start += length
            ends.append(_End(start, roles[number], number + 1))
        if ends and ends[-1].messages < len(roles):
            rendered = self._chat.template.length_in(text, messages, tools)
            if rendered > ends[-1].length:
                ends.append(_End(rendered, roles[-1], len(roles)))

    def _front(self, messages: Sequence[Message], tools: Sequence[Any], text: str) -> int:
        """Return the template's own characters before the first message, such as the tools' description."""
        marked = [{**messages[0], "content": marker("first")}, *messages[1:]]
        before, found, _ = self._chat.template.render_or_not(marked, tools).partition(marker("first"))
        header = self._traits.user_header
        if not (found and header and before.endswith(header) and text.startswith(before)):
            return 0
        front = before.removesuffix(header)
        return len(front) if self._chat.tokenizer.without_tokens(front).strip() else 0
