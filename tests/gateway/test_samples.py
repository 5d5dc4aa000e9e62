"""The models that the gateway lists, of backends with adapters."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from prorl_zmq.gateway.samples import Samples
from prorl_zmq.wire.messages.backends import Backend, BackendList, BackendStatus


class Broker:
    """A connection to a backend broker with these backends."""

    def __init__(self, *backends: Backend) -> None:
        self._backends = backends

    async def ask_backend_broker(self, _sender: Any, request: Any) -> BackendList:
        listed = tuple(BackendStatus(backend=one, state="ready", in_flight=0, assigned=0) for one in self._backends)
        return BackendList(request.request_id, backends=listed)


def test_adapters_are_models_with_versions_of_their_own() -> None:
    base = Backend(backend_id="one", endpoint="ipc:///one", model="qwen", weight_version=3, scores=True)
    both = [
        Backend(backend_id="two", endpoint="ipc:///two", model="qwen", scores=True, adapters={"a": 7, "b": 1}),
        Backend(backend_id="three", endpoint="ipc:///three", model="qwen", scores=True, adapters={"a": 8}),
    ]
    found = asyncio.run(Samples(cast("Any", Broker(base, *both)), cast("Any", None), "gateway").models())
    assert {name: (one.versions, one.scores, one.engine) for name, one in found.items()} == {
        "policy": ({3, 0}, True, "qwen"),
        "a": ({7, 8}, False, "qwen"),
        "b": ({1}, False, "qwen"),
    }
    assert next(name for name, one in found.items() if one.engine == "qwen") == "policy", "by its engine's name"
