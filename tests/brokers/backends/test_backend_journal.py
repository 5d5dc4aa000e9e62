"""What a backend broker remembers: a handler that is restarted between any two events answers as one that was not."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prorl_zmq.brokers.backends.backend_journal import BackendJournal
from prorl_zmq.brokers.backends.backend_records import BackendRecord, WeightsRecord
from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.brokers.backends.weight_calls import AGAIN_S, wait_share
from prorl_zmq.errors import ConfigError, InvalidWeights, JournalFailed
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Backend,
    BackendAlive,
    BackendList,
    ClearBackends,
    DrainBackend,
    ListBackends,
    RemoveBackend,
)
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.messages.engines import WeightUpdate

if TYPE_CHECKING:
    from pathlib import Path

LEASE_S = 10.0
NAMES = st.sampled_from("xy")
VERSIONS = st.integers(0, 3)


def backend(name: str, version: int = 0, endpoint: str = "") -> Backend:
    return Backend(backend_id=name, endpoint=endpoint or f"ipc://{name}", weight_version=version)


def record(name: str, **more: Any) -> BackendRecord:
    return BackendRecord(**{"fate": "listed", "backend": backend(name), **more})


REQUESTS = st.one_of(
    st.builds(
        lambda name, version, where, beats: AddBackend("r", backend(name, version, where), beats),
        NAMES,
        VERSIONS,
        st.sampled_from(["", "ipc://elsewhere"]),
        st.booleans(),
    ),
    st.builds(lambda name, version: BackendAlive("r", name, version), NAMES, VERSIONS),
    st.builds(lambda name: DrainBackend("r", name), NAMES),
    st.builds(lambda name: RemoveBackend("r", name), NAMES),
    st.builds(lambda version, name: WeightUpdate("r", "set", version, backend_id=name), VERSIONS, st.none() | NAMES),
    st.builds(lambda version: WeightUpdate("r", "begin", version, limit_s=1000.0 * LEASE_S), VERSIONS),
    st.builds(lambda version: WeightUpdate("r", "end", version), VERSIONS),
    st.builds(lambda version: WeightUpdate("r", "cancel", version), VERSIONS),
    st.just(ClearBackends("r")),
    st.just("silence"),
)


def reply_of(handler: BackendRequestHandler, request: Any, now: float) -> Any:
    """What is answered; engine hosts do what they are asked at once."""
    answers = handler.handle([b"c", b""], request, now)
    for call in handler.weights.take_calls():
        answers += handler.engine_answered(call.request.request_id, None, now)
    return answers[0].reply


def listed(handler: BackendRequestHandler, now: float) -> list[tuple[Any, ...]]:
    (answer,) = handler.handle([b"c", b""], ListBackends("list"), now)
    assert isinstance(answer.reply, BackendList)
    backends = sorted(answer.reply.backends, key=lambda one: one.backend.backend_id)
    return [(one.backend, one.state, one.problem, one.load is None) for one in backends]


@given(st.lists(st.tuples(REQUESTS, st.booleans()), max_size=40))
@example(
    [
        (WeightUpdate("r", "begin", 1, limit_s=LEASE_S), False),
        (AddBackend("r", backend("x", 2)), False),
        (WeightUpdate("r", "end", 1), True),
    ]
)
def test_a_restart_changes_nothing(events: list[tuple[Any, bool]]) -> None:
    steady, restarted = BackendRequestHandler(LEASE_S), BackendRequestHandler(LEASE_S)
    remembered: dict[str, BackendRecord] = {}
    weights: tuple[WeightsRecord, ...] = ()
    now = 0.0
    for number, (event, restarts) in enumerate(events):
        if event == "silence":
            now += 2 * LEASE_S
            steady.tick(now)
            restarted.tick(now)
        else:
            request = msgspec.structs.replace(event, request_id=f"r-{number}")
            replies = [reply_of(handler, request, now) for handler in (steady, restarted)]
            assert replies[0] == replies[1]
        for name, change in restarted.take_changes().items():
            if change is None:
                remembered.pop(name, None)
            else:
                remembered[name] = change
        changed = restarted.take_weights()
        weights = weights if changed is None else changed
        if restarts:
            restarted = BackendRequestHandler(LEASE_S)
            restarted.restore(remembered.values(), now, weights=weights)
        assert listed(steady, now) == listed(restarted, now)


def test_the_file_has_what_was_written_in_the_order_in_which_it_first_came(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with BackendJournal(path) as journal:
        assert journal.load() == []
        journal.write({"x": record("x"), "y": record("y", heartbeats=True, reported=3), "z": record("z")})
        journal.write({"x": record("x", draining=True, needed_version=2), "z": None, "unheard-of": None})
    with BackendJournal(path) as journal:
        assert journal.load() == [
            record("x", draining=True, needed_version=2),
            record("y", heartbeats=True, reported=3),
        ]
        with pytest.raises(JournalFailed, match="in use by another process"):
            BackendJournal(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_file_has_which_weights_were_wanted_last(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with BackendJournal(path) as journal:
        assert journal.load_weights() == []
        journal.write({}, [WeightsRecord(3, 4, 60.0)])
        journal.write({"x": record("x")}, [WeightsRecord(4), WeightsRecord(9, path="/b", model="b")])
        journal.write({"x": record("x", draining=True)})
    with BackendJournal(path) as journal:
        assert journal.load_weights() == [WeightsRecord(4), WeightsRecord(9, path="/b", model="b")]
        assert journal.load() == [record("x", draining=True)]
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE weights SET record = x'81a16101'")
    connection.close()
    with BackendJournal(path) as journal, pytest.raises(ConfigError, match="does not say which weights are wanted"):
        journal.load_weights()


def test_a_broker_that_was_restarted_in_the_middle_of_an_update_goes_on_with_it() -> None:
    handler = BackendRequestHandler(LEASE_S)
    handler.handle([b"c", b""], AddBackend("r", backend("x")), 0.0)
    assert reply_of(handler, WeightUpdate("r", "begin", 5, limit_s=30.0), 1.0) == Done("r")
    records, weights = [one for one in handler.take_changes().values() if one is not None], handler.take_weights()
    assert weights == (WeightsRecord(0, 5, 30.0),)
    assert handler.take_weights() is None
    again = BackendRequestHandler(LEASE_S)
    again.restore(records, 100.0, weights=weights or ())
    assert again.take_weights() is None, "the file has it already"
    assert {one[1] for one in listed(again, 100.0)} == {"updating"}
    again.tick(129.0)
    assert {one[1] for one in listed(again, 129.0)} == {"updating"}
    again.tick(130.0)
    assert {one[1] for one in listed(again, 130.0)} == {"ready"}, "given up, a whole limit after the restart"
    assert again.take_weights() == (WeightsRecord(0),)
    after = BackendRequestHandler(LEASE_S)
    after.restore(records, 100.0, weights=[WeightsRecord(0, 5, 30.0)], of_before=True)
    assert {one[1] for one in listed(after, 100.0)} == {"ready"}, "the service that began the update has ended"
    assert after.take_weights() == (WeightsRecord(),)


def test_a_service_that_was_started_again_wants_the_weights_that_were_announced() -> None:
    """It took engines of version 0 for ready, and batches refused each of their rollouts."""
    handler = BackendRequestHandler(LEASE_S)
    known = [record("mine"), record("x", backend=backend("x", 5), heartbeats=True, reported=5)]
    handler.restore(known, 0.0, weights=[WeightsRecord(5)], of_before=True)
    handler.handle([b"c", b""], AddBackend("r", backend("x"), heartbeats=True), 1.0)
    states = {one[0].backend_id: one[1:3] for one in listed(handler, 1.0)}
    assert {state for state, _ in states.values()} == {"behind"}
    assert states["x"][1] == (
        "it serves weights 0 where 5 are wanted: load them with `prorl backends update-weights PATH 5`, or, if its "
        "engine has them, say so with `prorl backends set-version 5`; a new training begins with `prorl backends "
        "set-version 0`"
    )
    assert handler.handle([b"j", b""], Assign("a", owner="o", job_id="j", attempt=1, wait_s=5.0), 1.0) == []
    (refused,) = handler.tick(7.0)
    assert isinstance(refused.reply, Refused)
    assert "it serves weights 0 where 5 are wanted: load them with" in refused.reply.error.message
    assert handler.handle([b"c", b""], WeightUpdate("r", "set", 0), 8.0) == []
    assert {one[1] for one in listed(handler, 8.0)} == {"ready"}
    assert handler.take_weights() == (WeightsRecord(0),)


def test_an_engine_of_a_service_that_was_started_again_loads_the_weights_from_their_path() -> None:
    handler = BackendRequestHandler(LEASE_S)
    handler.restore([], 0.0, weights=[WeightsRecord(5, path="/weights/5")], of_before=True)
    handler.handle([b"c", b""], AddBackend("r", backend("x"), heartbeats=True), 1.0)
    (call,) = handler.weights.take_calls()
    assert call.request.step == "load"
    assert (call.request.path, call.request.weight_version) == ("/weights/5", 5)
    ((_, state, problem, _),) = listed(handler, 1.0)
    assert (state, problem) == ("behind", "it serves weights 0 where 5 are wanted: it is loading them from /weights/5")
    handler.engine_answered(call.request.request_id, InvalidWeights("no such file"), 2.0)
    problem = next(iter(listed(handler, 2.0)))[2]
    assert f"loading them failed, and the next try is in {wait_share('x') * AGAIN_S:.0f} s: " in problem
    assert "`prorl backends update-weights FOLDER VERSION --take-over`" in problem
    handler.handle([b"c", b""], BackendAlive("r", "x", 5), 3.0)
    assert {one[1:3] for one in listed(handler, 3.0)} == {("ready", "")}


def test_a_row_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with BackendJournal(path) as journal:
        journal.write({"x": record("x")})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE backends SET record = x'81a16101'")
    connection.close()
    with BackendJournal(path) as journal, pytest.raises(ConfigError, match="holds a backend that cannot be read"):
        journal.load()


def test_a_service_that_was_started_anew_is_told_from_a_broker_that_was(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with BackendJournal(path) as journal:
        assert not journal.begin_service("one")
        assert not journal.begin_service("one")
        assert journal.begin_service("two")
    with BackendJournal(path) as journal:
        assert not journal.begin_service("two")


@pytest.mark.parametrize("fate", ["listed", "lost"])
def test_engines_of_a_new_service_were_held_to_the_weights_of_the_one_before(fate: str) -> None:
    old = [record("x", fate=fate, backend=backend("x", 7), heartbeats=True, reported=7), record("mine", draining=True)]
    for of_before, state in ((False, "behind"), (True, "ready")):
        handler = BackendRequestHandler(LEASE_S)
        handler.restore(old, 0.0, of_before=of_before)
        handler.handle([b"c", b""], AddBackend("r", backend("x"), heartbeats=True), 1.0)
        assert {(one[0].backend_id, one[1]) for one in listed(handler, 1.0)} == {("x", state), ("mine", "draining")}
    handler = BackendRequestHandler(LEASE_S)
    handler.restore(old[:1], 0.0, of_before=True)
    reply = handler.handle([b"c", b""], BackendAlive("r", "x", 7), 1.0)[0].reply
    assert isinstance(reply, Refused) == (fate == "lost"), "one that lives on goes on as it was"
    handler = BackendRequestHandler(LEASE_S)
    handler.restore(old, 0.0, of_before=True)
    again = BackendRequestHandler(LEASE_S)
    again.restore([one for one in handler.take_changes().values() if one is not None], 1.0)
    again.handle([b"c", b""], AddBackend("r", backend("x"), heartbeats=True), 1.0)
    assert ("x", "ready") in {(one[0].backend_id, one[1]) for one in listed(again, 1.0)}, "also after a restart"


def test_a_trainer_that_begins_again_is_not_held_to_earlier_weights() -> None:
    handler = BackendRequestHandler(LEASE_S)
    handler.restore([record("x", backend=backend("x", 7), heartbeats=True, reported=7)], 0.0)
    handler.handle([b"c", b""], AddBackend("r", backend("x"), heartbeats=True), 1.0)
    ((_, state, problem, _),) = listed(handler, 1.0)
    assert (state, "serves weights 0 where 7 are wanted" in problem) == ("behind", True)
    handler.handle([b"c", b""], WeightUpdate("r", "set", 1, backend_id="x"), 1.0)
    assert {one[1:3] for one in listed(handler, 1.0)} == {("ready", "")}
