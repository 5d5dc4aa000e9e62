from __future__ import annotations

from collections import Counter

import pytest

from prorl_zmq.brokers.request_routing import ASKED_OF, BACKEND_BROKER, ENGINE_HOST, FRONT_DOOR, convert_request
from prorl_zmq.errors import MalformedMessage
from prorl_zmq.wire.messages.backends import AnyBackendRequest
from prorl_zmq.wire.messages.engines import AnyEngineRequest
from prorl_zmq.wire.messages.front_door import FrontDoorRequest


def test_every_request_but_one_has_one_place() -> None:
    places = Counter(tag for known in ASKED_OF.values() for tag in known)
    assert {tag: count for tag, count in places.items() if count > 1} == {"weight_update": 3}


@pytest.mark.parametrize(
    ("kinds", "here"),
    [(FrontDoorRequest, FRONT_DOOR), (AnyBackendRequest, BACKEND_BROKER), (AnyEngineRequest, ENGINE_HOST)],
)
def test_a_malformed_update_of_weights_is_malformed_at_each_of_its_places(kinds: object, here: str) -> None:
    content = {"type": "weight_update", "request_id": "r", "step": "jump", "weight_version": 1}
    with pytest.raises(MalformedMessage) as refused:
        convert_request(content, kinds, here)
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
        convert_request({"type": tag}, AnyBackendRequest if here == BACKEND_BROKER else FrontDoorRequest, here)


@pytest.mark.parametrize("content", [{"type": "hello"}, {"type": "what"}, {"type": []}, {}, [], None])
def test_what_it_does_not_know_is_left_to_the_decoder(content: object) -> None:
    with pytest.raises(MalformedMessage) as refused:
        convert_request(content, FrontDoorRequest, FRONT_DOOR)
    assert "is asked of" not in refused.value.message
