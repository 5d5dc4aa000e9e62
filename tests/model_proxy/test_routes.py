from __future__ import annotations

import pytest

from prorl_zmq.model_proxy.dialect import Routes
from prorl_zmq.model_proxy.dialects.gemini import Gemini
from prorl_zmq.model_proxy.dialects.messages import Messages

ROUTES = Routes([Messages(), Gemini()])


@pytest.mark.parametrize(
    ("path", "purpose", "places"),
    [
        ("/messages", "create", {}),
        ("/s/x/v1/messages/", "create", {}),
        ("/v1/messages/count_tokens", "count", {}),
        ("/v1beta/models/org/name:streamGenerateContent", "stream", {"model": "org/name"}),
    ],
)
def test_a_path_is_known_by_its_end(path: str, purpose: str, places: dict[str, str]) -> None:
    (match,) = ROUTES.matches(path)
    assert (match.route.purpose, match.places) == (purpose, places)


@pytest.mark.parametrize("path", ["/", "/v1/messages/batches", "/mymessages", "/models/:generateContent"])
def test_other_paths_are_not(path: str) -> None:
    assert ROUTES.matches(path) == []
