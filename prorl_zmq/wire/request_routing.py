"""`convert_request`: reads a request at one of the service's ROUTER sockets.

It refuses what another version of the protocol has sent, and what is asked of another socket, with that one's name.
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
"""What is asked of each place."""
ASKED_OF: dict[str, dict[str, Any]] = {
    place: {str(kind.__struct_config__.tag): kind for kind in get_args(kinds) or (kinds,)}
    for place, kinds in KINDS.items()
}
"""The requests of each place, by their tags."""


def convert_request(content: Any, kinds: Any, here: str) -> Any:
    """Return an unpacked header as one of the requests that are asked `here`.

    Raises:
        VersionMismatch: the sender speaks another protocol.
        MalformedMessage: it is no request, or one that is asked elsewhere.
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
    """Raise `VersionMismatch` if a header is of another protocol; what names no type or no number is malformed."""
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
