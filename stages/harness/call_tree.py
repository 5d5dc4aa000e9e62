"""The calls of one rollout as a tree, whatever the harness does to its history. No I/O, no clock.

A call continues the turn of its conversation whose history it repeats: the same messages, and then that turn,
identified by its ids or, if the harness sent none, by its text. Later messages are new. A call that continues no turn
begins its own line:

    what it begins with                                                               its kind
    the harness's headers say what it is                                              that one
    the job's prompt, and tools: the first of these; or the prompt; or tools; or all  main
    with tools, and a text that a call handed over: the task of a sub-agent           subagent
    a line's tools, and a text that a turn without calls replied: a compaction        that of what was compacted
    the tools, the system message and the prompt of the main line                     main
    anything else: a title, a memory, a commit message                                side

A turn that no call builds on is an orphan if the harness did not get it whole (undelivered), repeated the request
(retried), or continued without it (dropped). A reply that arrived whole and may be the end of a conversation is never
retried: two rollouts may use one address. Two equal calls at the same time both stay, as does a turn that a compaction
left out.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...data.trajectory import Role
from .adapter import CallKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ...inference.chat import Piece, ReadTurn
    from ...inference.engine import Generation
    from ...model_proxy.calls import ModelRequest, ReplyCall, RequestMessage

HANDED_OVER = 20
"""Fewest characters of an argument that counts as a sub-agent's task."""
RECENT = 32
"""Turns that a new line is compared with."""
HANDED_OVER_TEXTS = 8
"""Arguments of a call that are searched."""
SUMMARY_LINE, SUMMARY_LINES = 40, 16
"""Fewest characters of a line by which a reply is found in a later conversation, and most lines searched."""
WAYS = 32
"""Paths through equal turns that are compared for one request."""
_LINE_ENDS = re.compile(r"\n|</?[a-z_]{1,32}>")


class OrphanReason(StrEnum):
    """Why nothing was built on a turn."""

    UNDELIVERED = "undelivered"
    RETRIED = "retried"
    DROPPED = "dropped"


class Said(NamedTuple):
    """The reply of a turn, as the harness got it."""

    text: str
    calls: tuple[ReplyCall, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The tokens that a turn added to its line."""

    context: tuple[Piece, ...]
    """The tokens that were new to the engine in this line."""
    generation: Generation
    read: ReadTurn


@dataclass(slots=True, eq=False)
class Turn:
    """A model call, with its reply once there is one."""

    turn_id: str
    number: int
    parent: Turn | None
    states: tuple[bytes, ...]
    front: bytes
    """Digest of its tools and system message."""
    rank: int
    """The likelihood that its line is the main one, if it begins a line."""
    conversation: str
    kind: CallKind
    line: CallKind
    """The kind of its line; a summary in the line has another kind itself."""
    said: Said | None = None
    opened: int = 0
    """The tree's event counters when the call began and ended; they show which calls overlap."""
    closed: int | None = None
    delivered: bool = False
    repeated: bool = False
    """Whether a later call repeats it in another history."""
    children: list[Turn] = field(default_factory=list)
    capture: Capture | None = None

    @property
    def digest(self) -> bytes:
        return self.states[-1]

    @property
    def captured(self) -> Capture:
        assert self.capture is not None
        return self.capture

    def path(self) -> list[Turn]:
        """Return its line from the beginning."""
        line: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            line.append(turn)
            turn = turn.parent
        return line[::-1]


@dataclass(slots=True)
class Place:
    """The place of a request: a path through the tree that its history may have taken."""

    states: list[bytes]
    """Digests of the history, up to the parent's turn and after each new message. The last is the request's."""
    parent: Turn | None = None
    new: list[RequestMessage] = field(default_factory=list)
    """The messages after the parent's turn; without a parent, all."""
    repeated: list[Turn] = field(default_factory=list)
    """Turns that the new messages repeat, in another history than their own."""

    def after(self, turn: Turn) -> Place:
        """Return the path that continues after a turn."""
        return Place([_digest(turn.turn_id)], turn, [], [*self.repeated])

    def add(self, message: RequestMessage, content: bytes, repeated: Sequence[Turn]) -> None:
        """Add a new message, the digest of its content, and the turns that it repeats."""
        self.new.append(message)
        self.repeated += repeated
        self.states.append(_digest((self.states[-1], content)))

    def asked(self) -> int:
        """Return how often the same request was made here; calls that ended undelivered do not count."""
        turns = self.parent.children if self.parent is not None else ()
        return sum(turn.digest == self.states[-1] and (turn.closed is None or turn.delivered) for turn in turns)


class CallTree:
    """All calls of one rollout, in order.

    Args:
        prompt: the task of the harness.
    """

    def __init__(self, prompt: str = "") -> None:
        self._prompt = " ".join(prompt.split())
        self.turns: list[Turn] = []
        self.answered: list[Turn] = []
        """In the order of their answers."""
        self._by_id: dict[str, Turn] = {}
        self._by_state: dict[bytes, list[Turn]] = defaultdict(list)
        """By the digest of their requests."""
        self._events = 0

    def locate(self, request: ModelRequest) -> Place:
        """Find the turn that a request continues.

        Equal turns, as two rollouts behind one address may sample, begin separate paths. Of the paths that the history
        may have taken, the one with the fewest equal requests counts.
        """
        ways = [Place([_beginning(request)])]
        for message in request.messages:
            if message.role == Role.ASSISTANT:
                found = [way.after(turn) for way in ways for turn in self._turns_of(message, way.states[-1])]
                if found:
                    ways = found[-WAYS:]
                    continue
            repeated = [self._by_id[turn_id] for turn_id in message.turn_ids if turn_id in self._by_id]
            content = _digest(_content(message))
            for way in ways:
                way.add(message, content, repeated)
        return min(ways, key=Place.asked)

    def open(self, turn_id: str, request: ModelRequest, place: Place, said: CallKind | None = None) -> Turn:
        """Add a call; its headers may have `said` its kind."""
        if place.parent is not None:
            place.parent.kind = place.parent.line  # another call continues it, so it was not a summary
            front, kind = place.parent.front, said or place.parent.kind
        else:
            front = _digest((request.tools, _system(request)))
            kind = said or self._kind_of_beginning(request, front)
        for turn in place.repeated:
            turn.repeated = True
        number, opened = len(self.turns), self._next_event()
        rank = self._rank(request)
        states, name = tuple(place.states), request.conversation
        turn = Turn(turn_id, number, place.parent, states, front, rank, name, kind, kind, opened=opened)
        self.turns.append(turn)
        self._by_id[turn_id] = turn
        if place.parent is not None:
            place.parent.children.append(turn)
        return turn

    def replied(self, turn: Turn, said: Said, capture: Capture | None = None) -> None:
        """Record the policy's reply and its tokens."""
        turn.said, turn.capture = said, capture
        self.answered.append(turn)
        self._by_state[turn.digest].append(turn)

    def close(self, turn: Turn, *, delivered: bool) -> None:
        """Note that a call is over, and whether the harness got the whole reply."""
        if turn.said is None:
            turn.states = turn.states[-1:]  # no later message can match these states
        turn.closed = self._next_event()
        turn.delivered = delivered

    def orphans(self) -> dict[Turn, OrphanReason]:
        """Return the turns whose reply no call continued, though one could have."""
        found: dict[Turn, OrphanReason] = {}

        def is_built_on(turn: Turn) -> bool:
            return turn.repeated or any(child.said is not None and child not in found for child in turn.children)

        for turn in reversed(self.turns):
            if turn.said is None or is_built_on(turn):
                continue
            others = [other for other in self.turns if other.parent is turn.parent and other is not turn]
            after = [other for other in others if turn.closed is not None and other.opened > turn.closed]
            before = [other for other in others if other.closed is not None and other.closed < turn.opened]
            # A delivered reply counts as retried only if another reply was used, and this one could not be the end:
            # each of two rollouts behind one address has its own end.
            could_end = turn.said.text.strip() and not turn.said.calls
            if turn.delivered:
                instead = [other for other in (*before, *after) if is_built_on(other) and not could_end]
            else:
                instead = [*after, *(other for other in before if is_built_on(other) or other.delivered)]
            if any(other.digest == turn.digest and other.said for other in instead):
                found[turn] = OrphanReason.RETRIED
            elif not turn.delivered:
                found[turn] = OrphanReason.UNDELIVERED
            elif any(turn.digest in other.states[:-1] for other in after if other.kind != CallKind.COMPACTION):
                found[turn] = OrphanReason.DROPPED
        return found

    def segments(self, kinds: Collection[CallKind]) -> Iterator[list[tuple[Turn, bool]]]:
        """Yield the lines that hold all turns of these kinds but orphans: each turn, and whether it is the line's own.

        Each turn is some line's own exactly once. Elsewhere it is context, as are turns of other kinds.
        """
        orphans = self.orphans()
        chosen = {turn for turn in self.turns if turn.said and turn.kind in kinds and turn not in orphans}
        inner = {above for turn in chosen for above in turn.path()[:-1]}
        given: set[Turn] = set()
        paths = [turn.path() for turn in self.turns if turn in chosen and turn not in inner]
        for path in sorted(paths, key=lambda path: (path[0].number, path[-1].number)):
            yield [(turn, turn in chosen and turn not in given) for turn in path]
            given.update(path)

    def _turns_of(self, message: RequestMessage, state: bytes) -> list[Turn]:
        """Return the turns that an assistant message may repeat, given the same history before it."""
        named = [turn for turn_id in message.turn_ids if (turn := self._by_id.get(turn_id))]
        if named:
            return [turn for turn in named if turn.digest == state and turn.said is not None][:1]
        said = _said(message)
        return [turn for turn in self._by_state.get(state, ()) if turn.said is not None and _said(turn.said) == said]

    def _kind_of_beginning(self, request: ModelRequest, front: bytes) -> CallKind:
        # A rejected or failed call is not a conversation.
        turns = [turn for turn in self.turns if turn.conversation == request.conversation]
        beginnings = [turn for turn in turns if turn.parent is None and (turn.said or turn.closed is None)]
        main = [turn.rank for turn in beginnings if turn.kind == CallKind.MAIN]
        rank = self._rank(request)
        if rank > max(main, default=-1):
            for turn in turns:
                if turn.line == CallKind.MAIN:
                    turn.kind = turn.line = CallKind.SIDE
            return CallKind.MAIN
        later = "\n".join(message.text for message in request.messages if message.role != Role.SYSTEM)
        same = next((turn.kind for turn in beginnings if turn.front == front), None)
        goes_on = any(turn.states[0] == _beginning(request) for turn in beginnings)
        recent = [turn for turn in turns if turn.said is not None][-RECENT:]
        for turn in reversed(recent):
            assert turn.said is not None
            handed_over = (text for call in turn.said.calls for text in _handed_over(call.arguments))
            if request.tools and any(text in later for text in handed_over):
                return CallKind.SUBAGENT
            summary = goes_on and not (turn.children or turn.said.calls)
            if summary and _is_repeated(turn.said.text, later):
                compacted = turn.parent.line if turn.parent is not None else same
                turn.kind = CallKind.COMPACTION
                return compacted or CallKind.MAIN
        if same == CallKind.MAIN and rank < max(main, default=0):
            return CallKind.SIDE
        return same or CallKind.SIDE

    def _rank(self, request: ModelRequest) -> int:
        users = (" ".join(message.text.split()) for message in request.messages if message.role == Role.USER)
        return bool(request.tools) + 2 * bool(self._prompt and any(self._prompt in text for text in users))

    def _next_event(self) -> int:
        self._events += 1
        return self._events


def _beginning(request: ModelRequest) -> bytes:
    return _digest((request.conversation, request.tools))


def _digest(content: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()


def _content(message: RequestMessage) -> tuple[object, ...]:
    calls = tuple((call.name, call.arguments) for call in message.calls)
    return int(message.role), message.text.strip(), calls, message.call_id


def _system(request: ModelRequest) -> list[str]:
    return [message.text for message in request.messages if message.role == Role.SYSTEM]


def _said(turn: RequestMessage | Said) -> tuple[str, list[tuple[str, str]]]:
    """Return a turn's text and calls, without the spaces that harnesses change."""
    return " ".join(turn.text.split()), [(call.name, "".join(call.arguments.split())) for call in turn.calls]


def _handed_over(arguments: str) -> Iterator[str]:
    """Yield the long texts among the arguments of a call."""
    try:
        values = msgspec.json.decode(arguments, type=dict[str, object]).values()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return
    for value in islice(values, HANDED_OVER_TEXTS):
        if isinstance(value, str) and len(value.strip()) >= HANDED_OVER:
            yield value.strip()


def _is_repeated(reply: str, later: str) -> bool:
    """Return whether a text has a long line of a reply, which may have lost its marks and its reasoning."""
    lines = (line.strip() for line in _LINE_ENDS.split(reply))
    long = [line for line in lines if len(line) >= SUMMARY_LINE]
    return any(line in later for line in long[-SUMMARY_LINES:])
