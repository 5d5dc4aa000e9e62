"""What a chat template writes between a turn of the policy and the next, found by rendering skeletons.

A skeleton has the shape of a conversation's opening and of its last turns, with short markers as contents, so its cost
does not depend on the conversation's length. The text behind the token that ends the last turn is what the engine sees
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
"""How many beginnings of a conversation are rendered for one prompt."""
EARLIER_CALLS = 90_001
"""The number of the first call that is not of the last turn."""
MEASURED_SHAPES = 512
"""Shapes whose measures are kept."""

_THOUGHT, _SPOKEN, _ARGUMENT = marker("thought"), marker("spoken"), marker("argument")
_EARLIER = marker("earlier")
"""What every turn but the last says."""


class TurnShape(NamedTuple):
    """What of a turn a template may look at."""

    reasoning: bool
    calls: tuple[str, ...]
    """The names of the tools that were called."""
    written: bool
    """The template is given the calls; otherwise they are part of the text."""


class Shape(NamedTuple):
    """What of a conversation a template may look at."""

    roles: tuple[str, ...]
    """Of the opening messages."""
    tools: bool
    """It is given tools."""
    turns: tuple[TurnShape, ...]
    """The last turn, and before it the one before, if there is one."""


class Measure(NamedTuple):
    """What rendering a shape shows."""

    last_marker: str
    """What the last turn says last."""
    closing: int
    """Characters of the turn after the token that ends it."""
    opening: int
    """Characters that open the next turn."""
    answers: tuple[tuple[int, int], ...]
    """Which answers the template divides from the next, and where: characters after the token that ends the turn."""
    rewritten: bool
    """The template changes what the engine saw."""


class Continuation(NamedTuple):
    """What comes between a turn and the next."""

    text: str
    boundaries: tuple[int, ...]
    """Where it is divided: after the rest of the turn, between tools' answers where the template allows it, and before
    what opens the next turn."""


class ChatSkeleton:
    """Finds what comes between turns; one for all conversations."""

    def __init__(self, template: ChatTemplate, traits: TemplateTraits) -> None:
        self._template = template
        self._traits = traits
        self.measure = lru_cache(MEASURED_SHAPES)(self._measure)
        """Gives the `Measure` of a `Shape`. Raises TemplateRefused: the template cannot render it."""

    def continuation(
        self, shape: Shape, results: Sequence[str], call_ids: Sequence[str], *, ended_by: str, calls_before: int = 0
    ) -> Continuation:
        """Return what follows the last turn.

        Args:
            shape: of the conversation.
            results: the answers to the last turn's calls.
            call_ids: of these calls.
            ended_by: the token that ended the turn; empty: it was cut off.
            calls_before: calls in earlier turns, for a template that counts them.

        Raises:
            TemplateRefused: the template cannot render this.
        """
        measure = self.measure(shape)
        turn, tools = shape.turns[-1], self._tools(shape)
        before = [*self._opening(shape), *self._counted(calls_before), self._turn(turn, _SPOKEN, call_ids)]
        answers = self._answers(turn, results, call_ids)
        text = self._template.render([*before, *answers], tools, opened=True)
        start, end = self._end(text, text.index(measure.last_marker) + len(measure.last_marker), turn)
        inner = [end + length for length in self._inner(shape, before, results, call_ids, len(text) - end)]
        boundaries = [end + measure.closing, *inner, len(text) - measure.opening]
        return self._cut(text, start, end, boundaries, ended_by)

    def following(
        self,
        turn: TurnShape,
        call_ids: Sequence[str],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        ended_by: str,
        calls_before: int = 0,
    ) -> Continuation:
        """Return what follows a turn, whatever messages come then; nothing before the turn's end is repeated.

        It is divided after the rest of the turn, between the messages where the template allows it, and before what
        opens the next turn.

        Raises:
            TemplateRefused: the template cannot render this.
        """
        opening: list[Message] = [{"role": "user", "content": marker("opening0")}]
        said = [*opening, *self._counted(calls_before), self._turn(turn, _SPOKEN, call_ids)]
        if self._traits.takes_system:
            said.insert(0, {"role": "system", "content": marker("system")})
        text = self._template.render([*said, *messages], tools, opened=True)
        if marker("system") in text.partition(_SPOKEN)[2]:  # the template writes it with a later message
            said.pop(0)
            text = self._template.render([*said, *messages], tools, opened=True)
        # The last of what the turn says: text that follows may spell the markers, and stands behind them.
        words = [_SPOKEN, *(_argument(_SPOKEN, index) for index in range(len(turn.calls)))]
        at, last_marker = max((text.find(word), word) for word in words)
        if at < 0:
            raise TemplateRefused("it leaves out what the policy says")
        start, end = self._end(text, at + len(last_marker), turn)
        looked_at = range(1, min(len(messages), RENDERED_BEGINNINGS))
        lengths = [self._template.length_in(text, [*said, *messages[:number]], tools) for number in looked_at]
        lengths += [0] * (len(messages) - 1 - len(lengths))  # one piece with what follows
        lengths.append(self._template.length_in(text, [*said, *messages], tools))
        closing = self._template.length_of(
            text[end:], self._after_turn(self._template.render_or_not(said, tools), last_marker)
        )
        boundaries = [end + closing]
        for length in lengths[: len(messages)]:
            boundaries.append(max(length, boundaries[-1]))
        return self._cut(text, start, end, boundaries, ended_by)

    def _end(self, text: str, behind: int, turn: TurnShape) -> tuple[int, int]:
        """Return where the token that ends a turn begins and ends, given where its last word ends."""
        start, end = self._traits.ends.find(text[behind:])
        if start < 0:
            if turn.written and turn.calls:
                raise TemplateRefused("it writes nothing that ends a turn of the policy")
            start = end = 0
        return behind + start, behind + end

    def _cut(self, text: str, start: int, end: int, boundaries: Sequence[int], ended_by: str) -> Continuation:
        """Take what the engine has not seen: the token that ends a turn only if none or another did."""
        written = text[start:end]
        seen = bool(ended_by) and (ended_by == written or written not in self._traits.ends.opening_next)
        cut = end if seen else start
        return Continuation(text[cut:], tuple(boundary - cut for boundary in boundaries))

    def _counted(self, calls: int) -> list[Message]:
        if not calls or not self._traits.counts_calls:
            return []
        turn = TurnShape(reasoning=False, calls=(marker("tool"),) * calls, written=True)
        return self._earlier(turn)

    def _earlier(self, turn: TurnShape) -> list[Message]:
        # Ids that no later call has: some templates look up a tool's name by them.
        ids = [self._traits.call_id(number, name) for number, name in enumerate(turn.calls, EARLIER_CALLS)]
        return [self._turn(turn, _EARLIER, ids), *self._answers(turn, (), ids)]

    def _inner(
        self, shape: Shape, before: Sequence[Message], results: Sequence[str], call_ids: Sequence[str], length: int
    ) -> list[int]:
        """Return where answers are divided, in characters after the token that ends the turn; nothing if not known.

        Each answer is rendered alone among markers: so all together cost as much as the conversation once.
        """
        measure = self.measure(shape)
        if not measure.answers:
            return []
        turn, tools = shape.turns[-1], self._tools(shape)
        markers = self._answers(turn, (), call_ids)
        marked, *with_one = (
            len(self._after_turn(self._template.render([*before, *answers], tools, opened=True), measure.last_marker))
            for answers in (
                markers,
                *(
                    [*markers[:n], answer, *markers[n + 1 :]]
                    for n, answer in enumerate(self._answers(turn, results, call_ids))
                ),
            )
        )
        longer = [0]
        for one in with_one:
            longer.append(longer[-1] + one - marked)
        if marked + longer[-1] != length:
            return []
        inner = [end + longer[n] for n, end in measure.answers]
        return inner if inner == sorted(inner) else []

    def _measure(self, shape: Shape) -> Measure:
        tools = self._tools(shape)
        seen = self._opening(shape)
        for turn in shape.turns[:-1]:
            seen += self._earlier(turn)
        last = shape.turns[-1]
        said = [*seen, self._turn(last, _SPOKEN)]
        answered = [*said, *self._answers(last)]
        before = self._template.render(seen, tools, opened=True)
        text = self._template.render(answered, tools, opened=True)
        words = [_SPOKEN, _THOUGHT, *(_argument(_SPOKEN, index) for index in range(len(last.calls)))]
        at, last_marker = max((text.rfind(word), word) for word in words)
        if at < 0:
            raise TemplateRefused("it leaves out what the policy says")
        rest = self._after_turn(self._template.render_or_not(said, tools), last_marker)
        start = self._end(text, at + len(last_marker), last)[1]
        answers = answered[len(said) :]
        ends = [(n, self._template.length_in(text, [*said, *answers[:n]], tools)) for n in range(1, len(answers))]
        closed = self._template.length_in(text, answered, tools)
        return Measure(
            last_marker,
            closing=self._template.length_of(self._after_turn(text, last_marker), rest),
            opening=len(text) - closed if closed else 0,
            answers=tuple((n, end - start) for n, end in ends if end > start),
            rewritten=not text.startswith(before) or (last.reasoning and _THOUGHT not in text[len(before) :]),
        )

    def _after_turn(self, text: str, last_marker: str) -> str:
        rest = text.partition(last_marker)[2]
        end = self._traits.ends.find(rest)[1]
        return rest[end:] if end >= 0 else ""

    def _opening(self, shape: Shape) -> list[Message]:
        return [{"role": role, "content": marker(f"opening{number}")} for number, role in enumerate(shape.roles)]

    def _tools(self, shape: Shape) -> list[dict[str, Any]]:
        return [marker_tool()] if shape.tools else []

    def _turn(self, turn: TurnShape, spoken: str, call_ids: Sequence[str] = ()) -> Message:
        written = self._calls(turn, call_ids, spoken) if turn.written else []
        thought = _THOUGHT if spoken == _SPOKEN else _EARLIER
        # Some templates write what is said behind the calls or their answers, or take none with reasoning and calls.
        return self._traits.turn("" if written else spoken, thought if turn.reasoning else None, written)

    def _answers(self, turn: TurnShape, results: Sequence[str] = (), call_ids: Sequence[str] = ()) -> list[Message]:
        results = results or [marker(f"result{index}") for index in range(len(turn.calls))]
        return self._traits.results(results, self._calls(turn, call_ids))

    def _calls(self, turn: TurnShape, call_ids: Sequence[str], spoken: str = "") -> list[WrittenCall]:
        call_ids = call_ids or [self._traits.call_id(number, name) for number, name in enumerate(turn.calls, 1)]
        return [
            WrittenCall(name, {marker("key"): _argument(spoken, index)}, call_id)
            for index, (name, call_id) in enumerate(zip(turn.calls, call_ids, strict=True))
        ]


def _argument(spoken: str, index: int) -> str:
    return f"{_ARGUMENT}{index}of{spoken}"
