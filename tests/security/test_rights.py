from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from prorl_zmq.errors import NotAllowed
from prorl_zmq.security.rights import ANYBODY, CONNECTING_ROLES, REQUESTS, Listener, Sender
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    AnyBackendRequest,
    Assign,
    BackendAlive,
    ClearBackends,
    DrainBackend,
    ListBackends,
    Release,
    RemoveBackend,
)
from prorl_zmq.wire.messages.base import KeyRole
from prorl_zmq.wire.messages.batches import CloseBatch, Feed, NextGroup, OpenBatch
from prorl_zmq.wire.messages.engines import AnyEngineRequest, Generate, WeightUpdate
from prorl_zmq.wire.messages.front_door import (
    Cancel,
    Collect,
    EndSession,
    FrontDoorRequest,
    ListSessions,
    Status,
    Submit,
    Trace,
)
from prorl_zmq.wire.messages.nodes import ListNodes
from prorl_zmq.wire.messages.watching import ListSteps, Peek, PeekTurns, ViewBatch, Watch

LOOK = {Status, ListNodes, ListBackends}
PROMISED = {
    KeyRole.TRAINER: LOOK | {WeightUpdate, Submit, Collect, Cancel, Trace, OpenBatch, Feed, NextGroup, CloseBatch},
    KeyRole.OPERATOR: LOOK
    | {WeightUpdate, Cancel, Trace, ListSessions, EndSession, Watch, Peek, PeekTurns, ViewBatch, ListSteps}
    | {AddBackend, DrainBackend, RemoveBackend, ClearBackends},
    KeyRole.STAGE: {Assign, Release, AddBackend, BackendAlive, RemoveBackend, Generate},
}
"""What SECURITY.md says that a key of each role may do."""
EVERY_REQUEST = [*get_args(FrontDoorRequest), *get_args(AnyBackendRequest), *get_args(AnyEngineRequest)]


def made(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A message of a kind; its fields do not matter here."""
    return kind(**{field.name: "" for field in msgspec.structs.fields(kind) if field.required})


@pytest.mark.parametrize("kind", EVERY_REQUEST)
def test_every_request_is_somebodys_right(kind: type[msgspec.Struct]) -> None:
    somebodys = frozenset().union(*REQUESTS.values())
    assert kind in somebodys, f"no role may ask for {kind.__name__}: add it to REQUESTS"


def test_rights_name_requests_only() -> None:
    assert frozenset().union(*REQUESTS.values()) == set(EVERY_REQUEST)
    assert set(REQUESTS) == set(KeyRole) - {KeyRole.SERVICE}
    assert set(CONNECTING_ROLES) == set(Listener)


@pytest.mark.parametrize(
    ("role", "kind", "able"),
    [
        (KeyRole.OPERATOR, Submit, "trainer"),
        (KeyRole.OPERATOR, Collect, "trainer"),
        (KeyRole.OPERATOR, Generate, "stage"),
        (KeyRole.TRAINER, ClearBackends, "operator"),
        (KeyRole.TRAINER, DrainBackend, "operator"),  # a stage's too, but no command takes one
        (KeyRole.STAGE, Submit, "trainer"),
        (KeyRole.STAGE, WeightUpdate, "trainer or operator"),
    ],
)
def test_who_may_not_is_told_who_may(role: KeyRole, kind: type[msgspec.Struct], able: str) -> None:
    tag = kind.__struct_config__.tag
    with pytest.raises(NotAllowed, match=rf"the {role} key k may not .* `{tag}`; .* of role {able}$") as caught:
        Sender(role, "k").check(made(kind))
    assert caught.value.key == "k"


@pytest.mark.parametrize("role", PROMISED)
def test_a_role_may_do_what_it_is_promised(role: KeyRole) -> None:
    for kind in PROMISED[role]:
        Sender(role, "k").check(made(kind))


def test_trainers_and_operators_do_not_reach_engine_hosts() -> None:
    assert CONNECTING_ROLES[Listener.ENGINE] == {KeyRole.STAGE, KeyRole.SERVICE}


def test_the_service_and_who_has_no_key_may_ask_for_all() -> None:
    for kind in EVERY_REQUEST:
        Sender(KeyRole.SERVICE, "service").check(made(kind))
        ANYBODY.check(made(kind))


def test_a_revoked_key_may_ask_for_nothing() -> None:
    with pytest.raises(NotAllowed, match="the key k was revoked"):
        Sender(None, "k", revoked=True).check(made(Status))
