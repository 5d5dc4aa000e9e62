"""Which of a service's sockets each kind of request is for: the wrong one refuses it with the name of the right one."""

from __future__ import annotations

from typing import Any, get_args

from ..errors import MalformedMessage
from ..wire import codec
from ..wire.messages.backends import AnyBackendRequest
from ..wire.messages.engines import AnyEngineRequest
from ..wire.messages.front_door import FrontDoorRequest

FRONT_DOOR = "the front door (`rollout_broker.front_door`)"
BACKEND_BROKER = "the backend broker (`backend_broker.endpoint`)"
ENGINE_HOST = "an engine host"

ASKED_OF: dict[str, dict[str, Any]] = {
    place: {str(kind.__struct_config__.tag): kind for kind in get_args(kinds)}
    for place, kinds in (
        (FRONT_DOOR, FrontDoorRequest),
        (BACKEND_BROKER, AnyBackendRequest),
        (ENGINE_HOST, AnyEngineRequest),
    )
}
"""The requests of each place, by their tags."""


def convert_request(content: Any, kinds: Any, here: str) -> Any:
    """Return an unpacked header as one of the requests that are asked `here`."""
    try:
        return codec.convert(content, kinds)
    except MalformedMessage:
        tag = content.get("type") if isinstance(content, dict) else None
        places = [place for place, known in ASKED_OF.items() if isinstance(tag, str) and tag in known]
        if not places or here in places:
            raise
        raise MalformedMessage(
            f"`{tag}` is asked of {places[0]}, and this is {here}; connect to the former, as the topology file has it",
            field="type",
        ) from None
