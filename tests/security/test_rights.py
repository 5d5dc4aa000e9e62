from __future__ import annotations

from contextlib import nullcontext
from typing import get_args

import msgspec
import pytest

from prorl_zmq.errors import NotAllowed
from prorl_zmq.security.rights import ANYBODY, CONNECTING_ROLES, Listener, Sender
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    AnyBackendRequest,
    Assign,
    BackendAlive,
    ClearBackends,
    DrainBackend,
    GenerationFailed,
    HoldWeights,
    ListBackends,
    ListKeys,
    ListModels,
    OwnerAlive,
    Release,
    RemoveBackend,
    ReportStarts,
)
from prorl_zmq.wire.messages.base import KeyRole, Request
from prorl_zmq.wire.messages.batches import CloseBatch, Feed, NextGroup, OpenBatch, SessionAlive
from prorl_zmq.wire.messages.blocks import FetchBlock
from prorl_zmq.wire.messages.engines import Abort, AnyEngineRequest, EngineHealth, Generate, Score, WeightUpdate
from prorl_zmq.wire.messages.front_door import (
    Cancel,
    Collect,
    EndSession,
    FrontDoorRequest,
    Hello,
    ListSessions,
    RelayBlocks,
    Status,
    Submit,
    Trace,
)
from prorl_zmq.wire.messages.nodes import ListNodes
from prorl_zmq.wire.messages.watching import ListSteps, Peek, PeekTurns, ViewBatch, Watch

LOOK = {Hello, Status, ListNodes, ListBackends, ListModels, FetchBlock}
WEIGHTS = {WeightUpdate, HoldWeights}
RIGHTS = {
    KeyRole.TRAINER: LOOK
    | WEIGHTS
    | {Submit, Collect, RelayBlocks, Cancel, Trace, OpenBatch, Feed, NextGroup, CloseBatch, SessionAlive, ListKeys},
    KeyRole.OPERATOR: LOOK
    | WEIGHTS
    | {Cancel, Trace, ListSessions, EndSession, Watch, Peek, PeekTurns, ViewBatch, ListSteps}
    | {AddBackend, DrainBackend, RemoveBackend, ClearBackends},
    KeyRole.STAGE: LOOK
    | {Assign, GenerationFailed, Release, OwnerAlive, ReportStarts, ListKeys, EngineHealth, Generate, Score, Abort}
    | {AddBackend, BackendAlive, DrainBackend, RemoveBackend},
}
"""All that a key of each role may ask for; SECURITY.md says it in words."""
EVERY_REQUEST = [*get_args(FrontDoorRequest), *get_args(AnyBackendRequest), *get_args(AnyEngineRequest), FetchBlock]


def made(kind: type[Request]) -> Request:
    """A message of a kind; its fields do not matter here."""
    return kind(**{field.name: "" for field in msgspec.structs.fields(kind) if field.required})


@pytest.mark.parametrize("kind", EVERY_REQUEST)
def test_every_request_is_somebodys_right(kind: type[Request]) -> None:
    assert kind.roles, f"no role may ask for {kind.__name__}: give it `roles`"


@pytest.mark.parametrize("role", RIGHTS)
def test_a_role_may_do_what_it_is_promised_and_no_more(role: KeyRole) -> None:
    assert {kind for kind in EVERY_REQUEST if role in kind.roles} == RIGHTS[role]
    for kind in EVERY_REQUEST:
        with nullcontext() if kind in RIGHTS[role] else pytest.raises(NotAllowed):
            Sender(role, "k").check(made(kind))


def test_each_listener_says_who_may_connect() -> None:
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
def test_who_may_not_is_told_who_may(role: KeyRole, kind: type[Request], able: str) -> None:
    tag = kind.__struct_config__.tag
    with pytest.raises(NotAllowed, match=rf"the {role} key k may not .* `{tag}`; .* of role {able}$") as caught:
        Sender(role, "k").check(made(kind))
    assert caught.value.key == "k"


def test_trainers_and_operators_do_not_reach_engine_hosts() -> None:
    for listener in (Listener.ENGINE, Listener.WEIGHTS):
        assert CONNECTING_ROLES[listener] == {KeyRole.STAGE, KeyRole.SERVICE}


def test_the_service_and_who_has_no_key_may_ask_for_all() -> None:
    for kind in EVERY_REQUEST:
        Sender(KeyRole.SERVICE, "service").check(made(kind))
        ANYBODY.check(made(kind))


def test_a_revoked_key_may_ask_for_nothing() -> None:
    with pytest.raises(NotAllowed, match="the key k was revoked"):
        Sender(None, "k", revoked=True).check(made(Status))
