"""The models that the gateway lists, of backends with adapters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from prorl_zmq.gateway.samples import Samples
from prorl_zmq.wire.messages.backends import AdapterModel, Backend, BackendList, BackendStatus

if TYPE_CHECKING:
    from collections.abc import Sequence


class Broker:
    """A connection to a backend broker with these backends and adapters."""

    def __init__(self, backends: Sequence[Backend], adapters: Sequence[AdapterModel]) -> None:
        self._backends, self._adapters = backends, adapters

    async def ask_backend_broker(self, _sender: Any, request: Any) -> BackendList:
        listed = tuple(BackendStatus(backend=one, state="ready", in_flight=0, assigned=0) for one in self._backends)
        return BackendList(request.request_id, backends=listed, adapters=tuple(self._adapters))


def test_adapters_are_models_with_versions_of_their_own() -> None:
    backends = [
        Backend(backend_id=name, endpoint=f"ipc:///{name}", model="qwen", weight_version=version, scores=True)
        for name, version in (("one", 3), ("two", 0))
    ]
    broker = Broker(backends, [AdapterModel("a", "policy", 7), AdapterModel("b", "policy", 1)])
    found = asyncio.run(Samples(cast("Any", broker), cast("Any", None), "gateway").models())
    assert {name: (one.versions, one.scores, one.engine) for name, one in found.items()} == {
        "policy": ({3, 0}, True, "qwen"),
        "a": ({7}, False, "qwen"),
        "b": ({1}, False, "qwen"),
    }
    assert next(name for name, one in found.items() if one.engine == "qwen") == "policy", "by its engine's name"
