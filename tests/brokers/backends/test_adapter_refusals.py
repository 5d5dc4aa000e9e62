"""Refused requests about adapters, with the reason."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.rollout.task_catalog import TaskCatalog
from prorl_zmq.errors import InvalidJob, from_info
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Backend,
    ListModels,
)
from prorl_zmq.wire.messages.base import Refused
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.messages.jobs import Job, Phase
from prorl_zmq.wire.messages.stages import Task
from prorl_zmq.wire.records import TEACHER

from .test_adapters import Host, Service


@pytest.mark.parametrize("scores", [True, False])
def test_a_teacher_may_be_an_adapter_whose_engines_can_score(*, scores: bool) -> None:
    host = Host("x")
    host.backend = replace(host.backend, scores=scores)
    service = Service(host)
    service.publish("a", 1)
    lacking = service.ask(ListModels("models")).lacking
    assert [one.model for one in lacking if one.record == TEACHER] == ([] if scores else ["policy", "a"])
    catalog = TaskCatalog(roles=[Phase.SCORE])
    catalog.add([Task("task")])
    catalog.list_models(["policy", "a"], lacking)
    with nullcontext() if scores else pytest.raises(InvalidJob, match="the teacher 'a' cannot score texts: backend x"):
        catalog.check(Job(task="task", instance={}, teacher="a"))


def refusal(service: Service, request: WeightUpdate) -> tuple[str, str]:
    reply = service.ask(request)
    assert isinstance(reply, Refused)
    return reply.error.code, reply.error.message


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (WeightUpdate("r", "load", 1, "/1", model="c"), "no_backend", "could be of p or q: name its base"),
        (WeightUpdate("r", "load", 1, "/1", model="c", base="z"), "no_backend", "serves the base model z: start one"),
        (WeightUpdate("r", "load", 1, "/1", model="a", base="q"), "no_backend", "a is an adapter of p, not of q"),
        (WeightUpdate("r", "load", 1, "/1", model="q", base="p"), "config_error", "q is a model of backends"),
        (WeightUpdate("r", "remove", 0, model="q"), "config_error", "q is a model of backends"),
        (
            WeightUpdate("r", "remove", 0, model="c"),
            "no_backend",
            "no adapter is published as the model c; adapters",
        ),
        (WeightUpdate("r", "begin", 2, model="a"), "malformed_message", "of which only a folder can be loaded"),
        (WeightUpdate("r", "set", 2, model="a"), "malformed_message", "of which only a folder can be loaded"),
    ],
)
def test_what_cannot_be_is_refused_by_name(request_: WeightUpdate, code: str, message: str) -> None:
    p, q = Host("p1", base="p"), Host("q1", base="q")
    service = Service(p, q)
    service.publish("a", 1, base="p")
    found = refusal(service, request_)
    assert found[0] == code
    assert message in found[1]
    assert (p.adapters, q.adapters) == ({"a": (1,)}, {})


def test_a_refusal_says_whether_a_trainer_may_wait() -> None:
    def is_final(service: Service, **changes: Any) -> bool:
        error = service.ask(WeightUpdate("r", "load", 1, "/1", **changes)).error
        return bool(from_info(error).fields.get("final"))

    service = Service(Host("p1", base="p"), Host("q1", base="q"), Host("r1", base="r", slots=0))
    service.publish("a", 1, base="p")
    for base in ("", "z", "r"):
        assert is_final(service, model="c", base=base)
    assert is_final(service, model="a", base="q")
    assert is_final(Service(Host("p1", base="p", slots=0, frozen=True)), model="p")
    none = Service(Host("x", slots=0))
    assert not is_final(none, model="a"), "engines with slots may come"


def test_without_slots_an_unknown_model_is_refused_with_those_there_are() -> None:
    code, message = refusal(Service(Host("x", slots=0)), WeightUpdate("r", "load", 1, "/1", model="a"))
    assert code == "no_backend"
    assert "no backend serves the model a (there are policy)" in message
    assert "needs backends with `lora`" in message


def test_a_backend_cannot_have_the_name_of_an_adapter() -> None:
    service = Service(Host("x"))
    service.publish("a", 1)
    reply = service.ask(AddBackend("add", Backend(backend_id="z", endpoint="ipc://z", name="a")))
    assert (reply.error.code, reply.error.fields) == ("config_error", {"key": "name"})
