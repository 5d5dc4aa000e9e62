from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from prorl_zmq.errors import ErrorInfo, MalformedMessage, VersionMismatch
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import AnyBackendRequest
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION, UNSAID_PROTOCOL
from prorl_zmq.wire.messages.front_door import FrontDoorRequest
from prorl_zmq.wire.request_routing import (
    ASKED_OF,
    BACKEND_BROKER,
    ENGINE_HOST,
    FRONT_DOOR,
    KINDS,
    convert_request,
)


@pytest.mark.parametrize(
    ("here", "kind"), [(here, kind) for here, known in ASKED_OF.items() for kind in known.values()]
)
def test_a_request_of_another_version_is_refused_with_both_numbers(here: str, kind: type[msgspec.Struct]) -> None:
    """Whatever else it holds: the other version may have other fields."""
    made = kind(**{field.name: "x" for field in msgspec.structs.fields(kind) if field.required})
    content = codec.unpack(codec.encode(made))
    assert content["protocol"] == PROTOCOL_VERSION, "a request names its protocol"
    for theirs in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 2**64 - 1):
        with pytest.raises(VersionMismatch, match=f"protocol {theirs}.*speaks {PROTOCOL_VERSION}") as refused:
            convert_request(content | {"protocol": theirs, "new": 1}, KINDS[here], here)
        assert refused.value.fields == {"ours": PROTOCOL_VERSION, "theirs": theirs}
        assert codec.decode(codec.encode(refused.value.info()), ErrorInfo).fields["theirs"] == theirs
    del content["protocol"]
    with pytest.raises(VersionMismatch, match="names no `protocol`") as refused:
        convert_request(content, KINDS[here], here)
    assert (refused.value.ours, refused.value.theirs) == (PROTOCOL_VERSION, UNSAID_PROTOCOL)


@pytest.mark.parametrize("content", [[], None, "hello", {"protocol": "8"}, {"protocol": None}, {"protocol": 8.0}])
def test_what_names_no_version_is_malformed(content: object) -> None:
    with pytest.raises(MalformedMessage):
        convert_request(content, FrontDoorRequest, FRONT_DOOR)


def test_every_request_but_one_has_one_place() -> None:
    places = Counter(tag for known in ASKED_OF.values() for tag in known)
    assert {tag: count for tag, count in places.items() if count > 1} == {"weight_update": 3}


@pytest.mark.parametrize("here", [FRONT_DOOR, BACKEND_BROKER, ENGINE_HOST])
def test_a_malformed_update_of_weights_is_malformed_at_each_of_its_places(here: str) -> None:
    content = {
        "type": "weight_update",
        "protocol": PROTOCOL_VERSION,
        "request_id": "r",
        "step": "jump",
        "weight_version": 1,
    }
    with pytest.raises(MalformedMessage) as refused:
        convert_request(content, KINDS[here], here)
    assert refused.value.field == "$.step"


@pytest.mark.parametrize(
    ("tag", "here", "place"),
    [
        ("hello", BACKEND_BROKER, "the front door"),
        ("assign", FRONT_DOOR, "the backend broker"),
        ("generate", FRONT_DOOR, "an engine host"),
    ],
)
def test_who_asks_the_wrong_one_is_told_the_right_one(tag: str, here: str, place: str) -> None:
    with pytest.raises(MalformedMessage, match=f"`{tag}` is asked of {place}.*, and this is {here[:10]}"):
        convert_request(
            {"type": tag, "protocol": PROTOCOL_VERSION},
            AnyBackendRequest if here == BACKEND_BROKER else FrontDoorRequest,
            here,
        )


@pytest.mark.parametrize("content", [{"type": "hello"}, {"type": "what"}, {"type": []}, {}])
def test_what_it_does_not_know_is_left_to_the_decoder(content: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage) as refused:
        convert_request(content | {"protocol": PROTOCOL_VERSION}, FrontDoorRequest, FRONT_DOOR)
    assert "is asked of" not in refused.value.message
