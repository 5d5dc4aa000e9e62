"""The text that a chat template writes between a turn of the policy and the next, found by rendering skeletons.

A skeleton has the shape of a conversation's opening and of its last turns, with short markers as contents, so its cost
does not depend on the conversation's length. The text after the token that ends the last turn is what the engine sees
next. If the skeleton does not begin with the one before the turn, or has lost the turn's reasoning, the template
rewrites what the engine has seen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .template import TemplateRefused, marker, marker_tool
from .traits import WrittenCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .template import ChatTemplate, Message
    from .traits import TemplateTraits

RENDERED_BEGINNINGS = 64
"""Most beginnings of a conversation that are rendered for one prompt."""
EARLIER_CALLS = 90_001
"""The number of the first call that is not of the last turn."""
RENDERED_SHAPES = 512
"""Most results of `rewrites` that are cached."""

_THOUGHT, _SPOKEN, _ARGUMENT = marker("thought"), marker("spoken"), marker("argument")
_EARLIER = marker("earlier")
"""The text of every turn but the last."""


class TurnShape(NamedTuple):
    """The properties of a turn that a template may depend on."""

    reasoning: bool
    calls: tuple[str, ...]
    """The names of the called tools."""
    written: bool
    """Whether the template gets the calls; otherwise they are part of the text."""
    after: tuple[str, ...] = ()
    """The roles of the messages that follow it and the answers to its calls."""


class Shape(NamedTuple):
    """The properties of a conversation that a template may depend on."""

    roles: tuple[str, ...]
    """Of the opening messages."""
    tools: bool
    """Whether it gets tools."""
    turns: tuple[TurnShape, ...]
    """The last turn, after those before it that decide what the template changes."""


class Continuation(NamedTuple):
    """The text between a turn and the next."""

    text: str
    boundaries: tuple[int, ...]
    """Where it is divided: after the rest of the turn, and after each message since; where the template does not allow
    it, a message ends where the next does."""


class ChatSkeleton:
    """Finds the text between turns; shared by all conversations."""

    def __init__(self, template: ChatTemplate, traits: TemplateTraits) -> None:
        self._template = template
        self._traits = traits
        self.rewrites = lru_cache(RENDERED_SHAPES)(self._rewrites)
        """Returns whether the template changes what the engine saw before the last turn of a `Shape`. Raises
        TemplateRefused: the template cannot render it."""

    def following(
        self,
        roles: Sequence[str],
        turn: TurnShape,
        call_ids: Sequence[str],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        ended_by: str,
        calls_before: int = 0,
    ) -> Continuation:
        """Return the text that follows a turn, whatever messages come next; nothing before the turn's end is repeated.

        Args:
            roles: of the opening messages.
            turn: the last one.
            call_ids: of its calls.
            messages: the messages since.
            tools: the tools that the template gets.
            ended_by: the token that ended the turn; empty: it was cut off.
            calls_before: calls in earlier turns, for a template that counts them.

        Raises:
            TemplateRefused: the template cannot render this.
        """
        opening = self._opening(roles)
        said = [*opening, *self._counted(calls_before), self._turn(turn, _SPOKEN, call_ids)]
        text = self._template.render([*said, *messages], tools, opened=True)
        if roles[0] == "system" and opening[0]["content"] in text.partition(_SPOKEN)[2]:
            said.pop(0)  # the template writes it with a later message
            text = self._template.render([*said, *messages], tools, opened=True)
        start, end = self._end(text, turn)
        alone = self._template.render_or_not(said, tools)
        boundaries = [end + self._template.length_of(text[end:], self._after_turn(alone, turn))]
        for length in self._lengths(text, said, messages, tools):
            boundaries.append(max(length, boundaries[-1]))
        # New to the engine: the token that ends a turn only if no token or another ended it.
        seen = bool(ended_by) and (ended_by == text[start:end] or text[start:end] not in self._traits.ends.opening_next)
        cut = end if seen else start
        return Continuation(text[cut:], tuple(boundary - cut for boundary in boundaries))

    def _lengths(
        self, text: str, said: Sequence[Message], messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """Return where messages end in a text; 0: where the next one does.

        Each is rendered alone among markers, so that all together cost as much as the text once.
        """
        if not messages:
            return []
        marked = [{**one, "content": one["content"] and marker(f"said{n}")} for n, one in enumerate(messages)]
        shown = self._template.render_or_not([*said, *marked], tools, opened=True)
        looked_at = messages[:RENDERED_BEGINNINGS] if len(messages) > 1 else ()
        lengths, longer = [], 0
        for n, message in enumerate(looked_at):
            one = self._template.render_or_not([*said, *marked[:n], message, *marked[n + 1 :]], tools, opened=True)
            longer += len(one) - len(shown)
            length = self._template.length_in(shown, [*said, *marked[: n + 1]], tools)
            lengths.append(length + longer if length else 0)
        if len(lengths) == len(messages):
            if len(shown) + longer == len(text) and lengths[-1]:
                return lengths
            lengths = []
        last = self._template.length_in(text, [*said, *messages], tools)
        return [*lengths, *[0] * (len(messages) - 1 - len(lengths)), last]

    def _end(self, text: str, turn: TurnShape) -> tuple[int, int]:
        """Return where the token that ends the last turn begins and ends.

        Raises:
            TemplateRefused: the turn's text is missing, or nothing ends its calls.
        """
        at, word = self._last_word(text, turn)
        if at < 0:
            raise TemplateRefused("it leaves out what the policy says")
        behind = at + len(word)
        start, end = self._traits.ends.find(text[behind:])
        if start < 0:
            if turn.written and turn.calls:
                raise TemplateRefused("it writes nothing that ends a turn of the policy")
            start = end = 0
        return behind + start, behind + end

    def _last_word(self, text: str, turn: TurnShape) -> tuple[int, str]:
        """Return the position of the last marker of the last turn: later text may repeat the marker, but follows it."""
        words = [_SPOKEN, _THOUGHT, *(_argument(_SPOKEN, index) for index in range(len(turn.calls)))]
        return max((text.find(word), word) for word in words)

    def _after_turn(self, text: str, turn: TurnShape) -> str:
        at, word = self._last_word(text, turn)
        rest = text[at + len(word) :] if at >= 0 else ""
        end = self._traits.ends.find(rest)[1]
        return rest[end:] if end >= 0 else ""

    def _counted(self, calls: int) -> list[Message]:
        if not calls or not self._traits.counts_calls:
            return []
        return self._earlier(TurnShape(reasoning=False, calls=(marker("tool"),) * calls, written=True))

    def _earlier(self, turn: TurnShape) -> list[Message]:
        # Ids that no later call has: some templates look up a tool's name by them.
        ids = [self._traits.call_id(number, name) for number, name in enumerate(turn.calls, EARLIER_CALLS)]
        return [self._turn(turn, _EARLIER, ids), *self._answers(turn, ids), *_after(turn)]

    def _rewrites(self, shape: Shape) -> bool:
        tools = [marker_tool()] if shape.tools else []
        seen = self._opening(shape.roles)
        for turn in shape.turns[:-1]:
            seen += self._earlier(turn)
        last = shape.turns[-1]
        before = self._template.render(seen, tools, opened=True)
        said = [self._turn(last, _SPOKEN), *self._answers(last), *_after(last)]
        text = self._template.render([*seen, *said], tools, opened=True)
        self._end(text, last)
        return not text.startswith(before) or (last.reasoning and _THOUGHT not in text[len(before) :])

    def _opening(self, roles: Sequence[str]) -> list[Message]:
        return [{"role": role, "content": marker(f"opening{number}")} for number, role in enumerate(roles)]

    def _turn(self, turn: TurnShape, spoken: str, call_ids: Sequence[str] = ()) -> Message:
        written = self._calls(turn, call_ids, spoken) if turn.written else []
        thought = _THOUGHT if spoken == _SPOKEN else _EARLIER
        # Some templates write a turn's text after the calls or their answers, or reject reasoning with calls.
        return self._traits.turn("" if written else spoken, thought if turn.reasoning else None, written)

    def _answers(self, turn: TurnShape, call_ids: Sequence[str] = ()) -> list[Message]:
        results = [marker(f"result{index}") for index in range(len(turn.calls))]
        return self._traits.results(results, self._calls(turn, call_ids))

    def _calls(self, turn: TurnShape, call_ids: Sequence[str], spoken: str = "") -> list[WrittenCall]:
        call_ids = call_ids or [self._traits.call_id(number, name) for number, name in enumerate(turn.calls, 1)]
        return [
            WrittenCall(name, {marker("key"): _argument(spoken, index)}, call_id)
            for index, (name, call_id) in enumerate(zip(turn.calls, call_ids, strict=True))
        ]


def _after(turn: TurnShape) -> list[Message]:
    return [{"role": role, "content": marker(f"after{number}")} for number, role in enumerate(turn.after)]


def _argument(spoken: str, index: int) -> str:
    return f"{_ARGUMENT}{index}of{spoken}"
