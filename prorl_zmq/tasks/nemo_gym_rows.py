"""Rows of NeMo Gym's JSONL, as instances of the task `environment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRecord
from .row_format import Record, formats_of, mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMS = "responses_create_params"
ROLES = ("system", "developer", "user", "assistant")
TEXTS = ("input_text", "output_text", "text")


def _instance(record: Record) -> dict[str, Any]:
    params = mapping(record, PARAMS, "in the format of the Responses API")
    for item in _messages(params):
        _check_message(item)
    for tool in params.get("tools") or ():
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise InvalidRecord(
                f"{PARAMS}.tools has a tool of type {kind!r}; only functions can be offered", field=PARAMS
            )
    return {"environment": "nemo-gym", "args": {"row": {**record, PARAMS: params}}}


def _messages(params: Mapping[str, Any]) -> Iterator[Any]:
    given = params.get("input")
    if isinstance(given, str):
        return iter(())
    if not isinstance(given, Sequence) or not given:
        raise InvalidRecord(f"{PARAMS}.input must be a text or a list of messages", field=PARAMS)
    return iter(given)


def _check_message(item: Any) -> None:
    kind = item.get("type") or "message" if isinstance(item, Mapping) else None
    if kind != "message":
        raise InvalidRecord(
            f"{PARAMS}.input has an item of type {kind!r}; a conversation can begin with messages only", field=PARAMS
        )
    if item.get("role") not in ROLES:
        raise InvalidRecord(f"{PARAMS}.input has a message of role {item.get('role')!r}", field=PARAMS)
    content = item.get("content")
    for part in () if isinstance(content, str) else content or (None,):
        if not isinstance(part, Mapping) or part.get("type") not in TEXTS:
            what = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidRecord(
                f"{PARAMS}.input has content of type {what!r}; the policy reads text only", field=PARAMS
            )


ROW_FORMATS = (
    formats_of("environment")("nemo-gym", "JSONL of NeMo Gym's resources servers, as it is", {PARAMS}, _instance),
)
