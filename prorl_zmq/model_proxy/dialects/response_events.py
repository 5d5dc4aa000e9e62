"""The events of a streamed Response. Each item is sent whole, when the turn is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..calls import new_turn_id
from .errors import error_object
from .events import named_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..calls import CallRefused, ModelReply

_Object = dict[str, Any]

_EMPTY: Final[dict[str, _Object]] = {
    "reasoning": {"summary": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}
"""What each kind of item has, before its first piece."""


class ResponseEvents:
    """Implements `EventStream`.

    Args:
        blank: returns a response in progress, by its id.
        finished: returns what a reply changes in it.
    """

    def __init__(self, blank: Callable[[str], _Object], finished: Callable[[ModelReply], _Object]) -> None:
        self._blank = blank
        self._finished = finished
        self._response: _Object | None = None
        self._number = 0

    def begin(self, turn_id: str, prompt_tokens: int) -> bytes:  # noqa: ARG002 - usage is null until the end
        """Return the first events."""
        return self._created(f"resp_{turn_id}") + self._event("response.in_progress", response=self._response)

    def waiting(self) -> bytes:
        """Return an event that says no more than that the response is in progress."""
        created = self._created(f"resp_{new_turn_id()}")  # of no turn: clients do not send it back
        return created + self._event("response.in_progress", response=self._response)

    def end(self, reply: ModelReply) -> bytes:
        """Return the reply."""
        response = (self._response or {}) | self._finished(reply)
        items = [self._event(kind, **data) for kind, data in _item_events(response["output"])]
        return b"".join([*items, self._event(f"response.{response['status']}", response=response)])

    def fail(self, error: CallRefused, refusal_status: int) -> bytes:  # noqa: ARG002 - a stream has no status
        """Return the event of a response that failed."""
        created = self._created(f"resp_{new_turn_id()}")
        told = error_object(error)
        failed = {"status": "failed", "error": {"code": told["code"], "message": told["message"]}}
        return created + self._event("response.failed", response=(self._response or {}) | failed)

    def _created(self, response_id: str) -> bytes:
        """Return the event that all others must follow, once; the id that it tells is that of the response."""
        if self._response is not None:
            return b""
        self._response = self._blank(response_id)
        return self._event("response.created", response=self._response)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **data})


def _item_events(items: list[_Object]) -> Iterator[tuple[str, _Object]]:
    for index, item in enumerate(items):
        kind = item["type"]
        place = {"item_id": item["id"], "output_index": index}
        added = item | _EMPTY[kind] | {"status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": added}
        if kind == "reasoning":
            yield from _part_events("reasoning_summary_part", "reasoning_summary_text", item["summary"][0], place)
        elif kind == "message":
            yield from _part_events("content_part", "output_text", item["content"][0], place)
        elif kind == "custom_tool_call":
            yield "response.custom_tool_call_input.delta", {**place, "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {**place, "input": item["input"]}
        else:
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, "arguments": item["arguments"]}
        yield "response.output_item.done", {"output_index": index, "item": item}


def _part_events(part_kind: str, text_kind: str, part: _Object, item_place: _Object) -> Iterator[tuple[str, _Object]]:
    place = {**item_place, "summary_index" if part["type"] == "summary_text" else "content_index": 0}
    more: _Object = {"logprobs": []} if part["type"] == "output_text" else {}
    yield f"response.{part_kind}.added", {**place, "part": part | {"text": ""}}
    yield f"response.{text_kind}.delta", {**place, "delta": part["text"], **more}
    yield f"response.{text_kind}.done", {**place, "text": part["text"], **more}
    yield f"response.{part_kind}.done", {**place, "part": part}
