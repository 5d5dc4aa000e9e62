"""The models that the gateway lists, of backends with adapters."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from prorl_zmq.errors import Busy, MalformedMessage, RequestTimeout
from prorl_zmq.gateway.samples import Asked, Samples, refused_by
from prorl_zmq.model_proxy.calls import CallRefused, Problem
from prorl_zmq.wire.messages.backends import AdapterModel, Backend, BackendList, BackendStatus, ListModels, ModelList
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence


class Broker:
    """A connection to a backend broker with these backends and adapters."""

    def __init__(self, backends: Sequence[Backend], adapters: Sequence[AdapterModel]) -> None:
        self._backends, self._adapters = backends, adapters
        self.asked = 0

    async def ask_backend_broker(self, _sender: Any, request: Any) -> BackendList | ModelList:
        self.asked += 1
        if isinstance(request, ListModels):
            return ModelList(request.request_id, tuple({one.name for one in self._backends}))
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
        "a": ({7}, True, "qwen"),
        "b": ({1}, True, "qwen"),
    }
    assert next(name for name, one in found.items() if one.engine == "qwen") == "policy", "by its engine's name"


def samples_of(*names: str, adapters: Sequence[AdapterModel] = ()) -> Samples:
    backends = [Backend(backend_id=name, endpoint="ipc:///x", name=name, scores=True) for name in names]
    return Samples(cast("Any", Broker(backends, adapters)), cast("Any", None), "gateway")


def test_the_policy_is_listed_only_if_it_is_served() -> None:
    assert set(asyncio.run(samples_of("base", "teacher").models())) == {"base", "teacher"}
    assert set(asyncio.run(samples_of().models())) == {"policy"}, "an engine may still come"
    refused = asyncio.run(samples_of("base").unknown("policy"))
    assert refused.message == "The model `policy` does not exist; there are: base."


def test_the_prompts_of_an_adapter_are_scored_by_its_version() -> None:
    samples = samples_of("base", adapters=[AdapterModel("a", "base", 7)])
    asked = Asked(model="a@7", instances=(), sampling=Sampling(), prompt_top=1)
    served = asyncio.run(samples.check(asked))
    assert served is not None
    assert (served.scores, served.versions, served.is_adapter) == (True, {7}, True)
    with pytest.raises(CallRefused, match="`a@8` is not served now; there are: a@7") as refused:
        asyncio.run(samples.check(replace(asked, model="a@8")))
    assert refused.value.problem == Problem.NOT_FOUND


def test_a_scored_request_asks_once_for_the_models_state(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker([Backend(backend_id="x", endpoint="ipc:///x", name="policy", scores=True)], [])
    samples = Samples(cast("Any", broker), cast("Any", None), "gateway")
    asked = Asked(model="policy", instances=(), sampling=Sampling(), prompt_top=1)

    async def nothing(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(samples, "_run", nothing)

    async def main() -> None:
        served = await samples.check(asked)
        assert served is not None
        assert served.scores
        assert await samples.run_all(cast("Any", None), asked, served) == []

    asyncio.run(main())
    assert broker.asked == 2, "the list of models and that of backends"


def test_an_error_of_the_service_keeps_its_kind() -> None:
    errors = {Busy("full"): Problem.BUSY, MalformedMessage("no", field="x"): Problem.INVALID}
    errors[RequestTimeout("late", timeout_s=1.0)] = Problem.FAILED
    assert [refused_by(error).problem for error in errors] == list(errors.values())
