"""Rows of NeMo Gym's JSONL: as instances of the task `environment`, and what the policy is shown of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRecord
from .row_format import Record, formats_of, mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMS = "responses_create_params"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text")


def opening_messages(params: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a request of the Responses API, with `role` and `content`.

    Raises:
        InvalidRecord: it has what a conversation with the policy cannot begin with.
    """
    given = params.get("input")
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    elif isinstance(given, Sequence) and given:
        messages = [_message(item) for item in given]
    else:
        raise _invalid("input must be a text or a list of messages")
    instructions = params.get("instructions")
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def offered_tools(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of a request of the Responses API.

    Raises:
        InvalidRecord: it has tools of another type.
    """
    tools = params.get("tools") or ()
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        if kind != "function":
            raise _invalid(f"tools has a tool of type {kind!r}; only functions can be offered")
    return [{key: tool.get(key) for key in ("name", "description", "parameters")} for tool in tools]


def _message(item: Any) -> dict[str, str]:
    kind = item.get("type") or "message" if isinstance(item, Mapping) else None
    if kind != "message":
        raise _invalid(f"input has an item of type {kind!r}; a conversation can begin with messages only")
    if item.get("role") not in ROLES:
        raise _invalid(f"input has a message of role {item.get('role')!r}")
    return {"role": ROLES[item["role"]], "content": "".join(_texts(item.get("content")))}


def _texts(content: Any) -> Iterator[str]:
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or (None,):
        if not isinstance(part, Mapping) or part.get("type") not in TEXTS:
            what = part.get("type") if isinstance(part, Mapping) else part
            raise _invalid(f"input has content of type {what!r}; the policy reads text only")
        yield str(part.get("text", ""))


def _invalid(what: str) -> InvalidRecord:
    return InvalidRecord(f"{PARAMS}.{what}", field=PARAMS)


def _instance(record: Record) -> dict[str, Any]:
    params = mapping(record, PARAMS, "in the format of the Responses API")
    opening_messages(params)
    offered_tools(params)
    return {"environment": "nemo-gym", "args": {"row": {**record, PARAMS: params}}}


ROW_FORMATS = (
    formats_of("environment")("nemo-gym", "JSONL of NeMo Gym's resources servers, as it is", {PARAMS}, _instance),
)
