"""`convert_request`: decodes a request at one of the service's ROUTER sockets.

Requests of another protocol version are rejected, and so are requests for another socket, with that socket's name.
"""

from __future__ import annotations

from typing import Any, get_args

from ..errors import MalformedMessage, VersionMismatch
from . import codec
from .messages.backends import AnyBackendRequest
from .messages.base import PROTOCOL_VERSION, UNSAID_PROTOCOL
from .messages.blocks import FetchBlock
from .messages.engines import AnyEngineRequest
from .messages.front_door import FrontDoorRequest

FRONT_DOOR = "the front door (`rollout_broker.front_door`)"
BACKEND_BROKER = "the backend broker (`backend_broker.endpoint`)"
ENGINE_HOST = "an engine host"
NODE_BROKER = "a node's broker"

KINDS: dict[str, Any] = {
    FRONT_DOOR: FrontDoorRequest,
    BACKEND_BROKER: AnyBackendRequest,
    ENGINE_HOST: AnyEngineRequest,
    NODE_BROKER: FetchBlock,
}
"""The requests that each socket accepts."""
ASKED_OF: dict[str, dict[str, Any]] = {
    place: {str(kind.__struct_config__.tag): kind for kind in get_args(kinds) or (kinds,)}
    for place, kinds in KINDS.items()
}
"""Each socket's requests, by tag."""


def convert_request(content: Any, kinds: Any, here: str) -> Any:
    """Return an unpacked header as one of `kinds`, the requests that the socket `here` accepts.

    Raises:
        VersionMismatch: the sender uses another protocol version.
        MalformedMessage: it is not a request, or one for another socket.
    """
    if isinstance(content, dict) and content.get("protocol") != PROTOCOL_VERSION:
        _check_protocol(content, here)
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


def _check_protocol(content: dict[str, Any], here: str) -> None:
    """Raise `VersionMismatch` for a header of another protocol version; without a type or number it is malformed."""
    theirs = content.get("protocol", UNSAID_PROTOCOL)
    if "type" not in content or not isinstance(theirs, int):
        return
    who = f"the other side speaks protocol {theirs}"
    if "protocol" not in content:
        who = f"the message names no `protocol`, as those of protocol {theirs} and before"
    raise VersionMismatch(
        f"{who}, and {here} speaks {PROTOCOL_VERSION}; install the same version of prorl-zmq on both sides",
        ours=PROTOCOL_VERSION,
        theirs=theirs,
    )
