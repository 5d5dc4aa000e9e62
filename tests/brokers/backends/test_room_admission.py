"""What the broker does with the number of rollouts that an engine's host takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from prorl_zmq.brokers.backends.admission_queue import PRECEDENCE_S
from prorl_zmq.brokers.backends.backend_registry import ADOPTED_S
from prorl_zmq.brokers.backends.context_means import COUNTED, ContextMeans
from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.errors import MalformedMessage, NotAllowed
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    BackendHeld,
    DrainBackend,
    EngineLoad,
    HeldAssignment,
    OwnerAlive,
    Release,
    RemoveBackend,
    WaitLonger,
)
from prorl_zmq.wire.messages.base import POLICY, Done, Refused
from prorl_zmq.wire.messages.engines import WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Iterable

LEASE_S = 10.0
BACKEND = Backend(backend_id="x", endpoint="ipc://x")
FULL_LOAD = EngineLoad(kv_tokens=4096)


class Broker:
    """A request handler; each client is named after its job. Hosts and owners are silent unless a test speaks."""

    def __init__(self, handler: BackendRequestHandler | None = None) -> None:
        self.handler = handler or BackendRequestHandler(LEASE_S)
        self.now = 0.0
        self.backends: dict[str, str] = {}
        """The backend of each job that has got one."""
        self.refused: dict[str, str] = {}
        self.longer: set[str] = set()
        self.waited_s: dict[str, float] = {}
        """For room, as the answer says."""

    def ask(self, request: Any, client: str = "other") -> Any:
        return self._take(self.handler.handle([client.encode(), b""], request, self.now)).get(client)

    def add(self, name: str = "x", /, room: int | None = None, **fields: Any) -> None:
        backend = Backend(backend_id=name, endpoint=f"ipc://{name}", **fields)
        assert isinstance(self.ask(AddBackend("add", backend, heartbeats=True, room=room)), Done)

    def beat(self, name: str = "x", room: int | None = None, weight_version: int = 0) -> Any:
        return self.ask(BackendAlive("beat", name, weight_version, FULL_LOAD, room=room))

    def assign(self, *jobs: str, group: str = "", leaving: str = "", model: str = POLICY, wait_s: float = 60.0) -> None:
        for job in jobs:
            request = Assign(
                f"{job}-{leaving}",
                owner="run",
                job_id=job,
                attempt=1,
                wait_s=wait_s,
                group_id=group,
                leaving=leaving,
                model=model,
            )
            self.ask(request, job)

    def ask_for(self, model: str, *jobs: str) -> None:
        """Let jobs ask for a model's backends; `backends` names the model too."""
        for job in jobs:
            request = Assign(f"{job}-{model}", owner="run", job_id=job, attempt=1, wait_s=60.0, model=model)
            self.ask(request, f"{job}/{model}")

    def release(self, job: str, served: int = 1, tokens: int = 0) -> None:
        self.backends.pop(job, None)
        self.ask(Release("release", job, 1, served, context_tokens=tokens))

    def pass_time(self, until: float, *, owners: Iterable[str] = ("run",), **rooms: int | None) -> None:
        """Tick each second; the named backends' hosts report their room, and the owners their jobs."""
        while self.now < until:
            self.now += 1.0
            for name, room in rooms.items():
                self.beat(name, room)
            for owner in owners:
                held = {job: HeldAssignment(1, backend) for job, backend in self.backends.items()}
                self.ask(OwnerAlive("alive", owner, held))
            self._take(self.handler.tick(self.now))

    def _take(self, answers: Iterable[Any]) -> dict[str, Any]:
        replies = {bytes(answer.envelope[0]).decode(): answer.reply for answer in answers}
        for client, reply in replies.items():
            if isinstance(reply, Assigned):
                self.backends[client] = reply.backend.backend_id
                self.waited_s[client] = reply.room_wait_s
            elif isinstance(reply, Refused):
                self.refused[client] = reply.error.code
            elif isinstance(reply, WaitLonger):
                self.longer.add(client)
        return replies


def test_jobs_beyond_the_room_wait_however_long_and_get_it_in_order() -> None:
    broker = Broker()
    broker.add(room=2)
    broker.assign("a", "b", "c", "d")
    assert (set(broker.backends), broker.longer) == ({"a", "b"}, {"c", "d"})
    assert broker.handler.next_deadline() is None
    broker.pass_time(600.0, x=2)
    assert broker.refused == {}
    broker.release("a")
    assert set(broker.backends) == {"b", "c"}
    broker.beat(room=3)
    assert set(broker.backends) == {"b", "c", "d"}


def test_an_answer_says_how_long_the_job_waited_for_room() -> None:
    """The wait for a backend that drains, or is not there, is another one."""
    broker = Broker()
    broker.assign("early")
    broker.pass_time(5.0)
    broker.add(room=1)
    broker.assign("a")
    broker.pass_time(15.0, x=1)
    broker.assign("b")
    broker.pass_time(25.0, x=1)
    broker.ask(DrainBackend("drain", "x"))
    broker.pass_time(32.0, x=1)
    broker.add(room=1)
    broker.pass_time(33.0, x=1)
    broker.release("early")
    broker.release("a")
    broker.assign("c")
    assert broker.waited_s == {"early": 0.0, "a": 21.0, "b": 11.0}
    broker.release("b")
    assert broker.waited_s["c"] == 0.0


@pytest.mark.parametrize("fate", ["answered", "unreachable"])
def test_an_update_of_weights_is_no_wait_for_room(fate: str) -> None:
    broker = Broker()
    broker.add(room=1)
    broker.assign("a", "b")
    broker.ask(WeightUpdate("update", "load", 1, "/weights"), "trainer")
    broker.now = 10.0
    (fetch,) = broker.handler.weights.take_calls()
    broker._take(broker.handler.engine_answered(fetch.request.request_id, None, broker.now))
    (load,) = broker.handler.weights.take_calls()
    broker.now = 30.0
    if fate == "answered":
        broker._take(broker.handler.engine_answered(load.request.request_id, None, broker.now))
    else:
        broker._take(broker.handler.engine_unreachable(load.address, NotAllowed("no such key", key="k"), broker.now))
    broker.now = 32.0
    broker.release("a")
    assert broker.waited_s["b"] == 12.0


def test_a_smaller_room_ends_nothing_and_a_job_that_asks_again_keeps_its_backend() -> None:
    broker = Broker()
    broker.add(room=3)
    broker.assign("a", "b", "c")
    broker.beat(room=1)
    broker.backends.clear()
    broker.assign("a", "b", "c")
    assert set(broker.backends) == {"a", "b", "c"}
    broker.release("a")
    broker.release("b")
    broker.assign("d")
    assert "d" not in broker.backends, "one is held, and one is the limit"


def test_a_wait_expires_once_no_ready_backend_is_full() -> None:
    broker = Broker()
    broker.add(room=1)
    broker.assign("a")
    broker.assign("b", wait_s=20.0)
    broker.pass_time(100.0, x=1)
    broker.ask(DrainBackend("drain", "x"))
    assert broker.handler.next_deadline() == pytest.approx(120.0)
    broker.pass_time(119.0, x=1)
    assert broker.refused == {}
    broker.pass_time(120.0, x=1)
    assert broker.refused == {"b": "no_backend"}


def test_a_host_that_falls_silent_ends_the_wait_for_its_room() -> None:
    broker = Broker()
    broker.add(room=1)
    broker.assign("a")
    broker.assign("b", wait_s=20.0)
    broker.pass_time(50.0, x=1)
    broker.pass_time(50.0 + LEASE_S + 21.0)
    assert broker.refused == {"b": "no_backend"}


def test_jobs_that_left_a_backend_come_first_then_groups_that_have_begun() -> None:
    broker = Broker()
    broker.add("x", room=1)
    broker.add("y", room=1)
    broker.assign("first", group="g")
    broker.assign("left")
    broker.assign("fresh")
    broker.assign("second", group="g")
    gone = broker.backends["left"]
    broker.ask(DrainBackend("drain", gone))
    broker.assign("left", leaving=gone)
    assert "left" in broker.longer
    order = []
    held = "first"
    for _ in range(3):
        broker.release(held)
        (held,) = set(broker.backends) - {"left", *order} if "left" in order else {"left"} & set(broker.backends)
        order.append(held)
    assert order == ["left", "second", "fresh"]


def test_an_engine_without_figures_is_scheduled_by_slots() -> None:
    broker = Broker()
    broker.add(max_in_flight=1)
    broker.assign(*"abcd")
    assert set(broker.backends) == set("abcd")
    assert broker.beat(room=None) == Done("beat")
    assert not broker.longer


def test_a_host_whose_engine_has_no_figures_any_more_limits_nothing() -> None:
    broker = Broker()
    broker.add(room=1)
    broker.assign("a", "b")
    assert set(broker.backends) == {"a"}
    broker.add(room=None, life="2")
    assert set(broker.backends) == {"a", "b"}


def test_with_the_schedule_slots_no_room_limits() -> None:
    broker = Broker(BackendRequestHandler(LEASE_S, heeds_room=False))
    broker.add(room=1)
    broker.beat(room=1)
    broker.assign("a", "b", "c", group="g")
    assert set(broker.backends) == {"a", "b", "c"}
    assert broker.beat(room=1) == BackendHeld("beat", 3), "the host's figures are right all the same"


def test_a_host_learns_how_many_rollouts_it_has_and_what_ended_ones_were() -> None:
    broker = Broker()
    broker.add(room=5)
    broker.assign("a", "b", "c", "d")
    broker.release("a", tokens=1000)
    broker.release("b", tokens=3000)
    broker.release("c", served=0)
    assert broker.beat(room=5) == BackendHeld("beat", rollouts=1, ended=2, known=2, mean_tokens=2000.0)


def test_a_host_that_takes_no_rollouts_at_all_is_refused() -> None:
    for request in (BackendAlive("beat", "x", 0, FULL_LOAD, room=0), AddBackend("add", BACKEND, room=0)):
        with pytest.raises(MalformedMessage, match="room"):
            codec.decode(codec.encode(request), type(request))


def test_of_a_mean_each_rollout_has_at_least_a_certain_share() -> None:
    means = ContextMeans()
    for _ in range(10 * COUNTED):
        means.note("m", 100)
    assert means.mean("m") == (COUNTED, 100.0)
    for _ in range(5 * COUNTED):
        means.note("m", 200)
    assert means.mean("m")[1] > 199
    assert means.mean("other") == (0, 0.0)


def test_a_restarted_broker_gives_no_rollouts_to_a_host_with_a_room_before_it_knows_those_it_has() -> None:
    broker = Broker()
    broker.add("x", room=2)
    broker.add("plain")
    broker.ask(DrainBackend("drain", "plain"))
    broker.assign("a", "b", "c")
    assert set(broker.backends.values()) == {"x"}
    records = [record for record in broker.handler.take_changes().values() if record is not None]
    restarted = Broker(BackendRequestHandler(LEASE_S))
    restarted.handler.restore([msgspec.structs.replace(one) for one in records], 0.0)
    restarted.assign("c")
    restarted.beat(room=2)
    assert restarted.backends == {}, "x may be full"
    restarted.backends.update(broker.backends)
    restarted.pass_time(ADOPTED_S + 2.0, x=2)
    assert restarted.backends.keys() == {"a", "b"}, "it is full"
    restarted.release("a")
    assert restarted.backends.keys() == {"b", "c"}


def test_a_restarted_broker_opens_a_host_with_room() -> None:
    broker = Broker()
    broker.add("x", room=2)
    records = [record for record in broker.handler.take_changes().values() if record is not None]
    restarted = Broker()
    restarted.handler.restore(records, 0.0)
    restarted.assign("a", "b", "c")
    restarted.pass_time(ADOPTED_S + 2.0, x=2)
    assert set(restarted.backends) == {"a", "b"}
    assert restarted.refused == {}


def test_adapters_of_one_backend_share_its_room_in_turns() -> None:
    broker = Broker()
    for adapter in "ab":
        broker.handler.heap.set_base(adapter, POLICY)
        broker.handler.heap.want_version(1, adapter)
    broker.add(room=1, adapter_slots=2, adapters={"a": (1,), "b": (1,)})
    broker.assign("a-0", model="a")
    broker.assign(*(f"a-{number}" for number in range(1, 4)), model="a")
    broker.assign(*(f"b-{number}" for number in range(3)), model="b")
    order = ["a-0"]
    for _ in range(6):
        broker.backends.clear()
        broker.ask(Release("release", order[-1], 1, 1, model=order[-1][0]))
        order += broker.backends
    assert sorted(order) == ["a-0", "a-1", "a-2", "a-3", "b-0", "b-1", "b-2"]
    assert {one[0] for one in order[1:3]} == {"a", "b"}, "a queue that is never empty keeps no other one waiting"


def test_queues_without_jobs_and_groups_are_forgotten() -> None:
    broker = Broker()
    broker.assign("a", model=POLICY)
    broker.release("a")
    broker.add()
    broker.assign("b", group="g")
    assert broker.handler._waiting == {}, "a backend without a room needs no memory of groups"
    assert broker.handler.waiting_by_model() == {}


def test_a_queue_of_jobs_that_are_pinned_to_a_version_does_not_outlive_them() -> None:
    broker = Broker()
    broker.handler.heap.set_base("a", POLICY)
    broker.handler.heap.want_version(1, "a")
    broker.add(room=1, adapter_slots=2, adapters={"a": (1,)})
    fields = {"owner": "run", "attempt": 1, "wait_s": 60.0, "group_id": "g", "model": "a", "pinned": 1}
    for job in "bc":
        broker.ask(Assign(job, job_id=job, **fields), job)
    assert set(broker.backends) == {"b"}
    assert broker.longer == {"c"}
    broker.ask(Release("release", "b", 1, 1, model="a"))
    assert set(broker.backends) == {"b", "c"}
    assert broker.handler._waiting == {}


class TwoModels(Broker):
    """A broker with one engine that serves the policy and the adapter `judge`, and has room for two rollouts."""

    def __init__(self, handler: BackendRequestHandler | None = None) -> None:
        super().__init__(handler)
        heap = self.handler.heap
        heap.set_base("judge", POLICY)
        heap.want_version(1, "judge")
        if "x" not in heap:
            self.add(room=2, adapter_slots=4)
        heap.set_adapters("x", {"judge": (1,)})

    def report(self, problem: str = "") -> None:
        self.ask(BackendAlive("beat", "x", 0, FULL_LOAD, problem, {"judge": (1,)}, room=2))

    def name_held(self, *jobs: str) -> None:
        self.ask(OwnerAlive("alive", "run", {job: HeldAssignment(1, "x") for job in jobs}))


def test_jobs_that_hold_a_backend_pass_those_that_wait_for_room() -> None:
    broker = TwoModels()
    broker.ask_for(POLICY, "a", "b")
    broker.report("slow for a moment")
    broker.ask_for("judge", "fresh", "a", "b")
    assert broker.backends.keys() == {"a/policy", "b/policy"}
    broker.report()
    assert broker.backends.keys() == {"a/policy", "b/policy", "a/judge", "b/judge"}
    assert broker.handler.waiting_by_model() == {"judge": 1}, "it holds nothing and gets room once others end"


def test_two_engines_whose_jobs_wait_for_each_other_are_not_stuck_after_an_outage() -> None:
    broker = Broker()
    broker.add("a", room=1)
    broker.add("b", room=1, name="judge")

    broker.ask_for(POLICY, "x")
    broker.ask_for("judge", "z")
    for name in "ab":
        broker.ask(BackendAlive("beat", name, 0, FULL_LOAD, "slow", room=1))
    broker.ask_for(POLICY, "new", "z")
    broker.ask_for("judge", "other", "x")
    for name in "ab":
        broker.beat(name, 1)
    assert broker.backends == {"x/policy": "a", "z/judge": "b", "x/judge": "b", "z/policy": "a"}


def test_a_restarted_broker_lets_jobs_pass_that_turn_out_to_hold_a_backend() -> None:
    broker = TwoModels()
    broker.ask_for(POLICY, "a", "b")
    records = [record for record in broker.handler.take_changes().values() if record is not None]
    handler = BackendRequestHandler(LEASE_S)
    handler.restore(records, 0.0)
    restarted = TwoModels(handler)
    restarted.ask_for("judge", "fresh", "a", "b")
    assert restarted.backends == {}
    restarted.name_held("a", "b")
    for _ in range(int(ADOPTED_S) + 2):
        restarted.now += 1.0
        restarted.report()
        restarted.name_held("a", "b")
    assert restarted.backends.keys() == {"a/judge", "b/judge"}
    assert restarted.handler.waiting == 1


def test_a_waiting_job_passes_others_once_it_holds_a_backend_of_another_model() -> None:
    broker = TwoModels()
    broker.ask_for(POLICY, "a", "b")
    broker.ask_for("judge", "fresh", "c")
    broker.add("z", name="second")
    broker.ask_for("second", "c")
    broker.report()
    assert broker.backends["c/judge"] == "x"
    assert "fresh/judge" not in broker.backends


def test_a_waiting_job_that_lost_the_backend_it_held_keeps_no_other_one_waiting() -> None:
    broker = TwoModels()
    broker.ask_for(POLICY, "a", "b")
    broker.add("z", name="second")
    broker.ask_for("second", "lost")
    broker.report("slow for a moment")
    broker.ask_for("judge", "lost", "a")
    broker.ask(RemoveBackend("remove", "z"))
    broker.report()
    assert broker.backends["a/judge"] == "x"
    assert "lost/judge" not in broker.backends


def test_the_waiting_jobs_of_a_silent_owner_are_forgotten() -> None:
    broker = Broker()
    broker.add(room=2)
    for owner, jobs in {"run": "ab", "dead": "cde", "late": "f"}.items():
        for job in jobs:
            broker.ask(Assign(job, owner=owner, job_id=job, attempt=1, wait_s=60.0), job)
    assert set(broker.backends) == {"a", "b"}
    broker.pass_time(LEASE_S + 1.0, owners=("run", "late"), x=2)
    assert broker.handler.waiting == 1
    broker.release("a")
    broker.release("b")
    assert set(broker.backends) == {"f"}


def test_a_silent_owner_that_also_holds_backends_gets_no_more_of_them() -> None:
    broker = Broker()
    broker.add(room=2)
    for owner, jobs in {"dead": "abcd", "run": "e"}.items():
        for job in jobs:
            broker.ask(Assign(job, owner=owner, job_id=job, attempt=1, wait_s=60.0), job)
    held = dict(broker.backends)
    broker.backends.clear()
    broker.pass_time(LEASE_S + 1.0, x=2)
    assert set(held) == {"a", "b"}
    assert set(broker.backends) == {"e"}


def test_queues_of_models_that_are_gone_are_forgotten() -> None:
    broker = TwoModels()
    broker.ask(Assign("a", owner="run", job_id="a", attempt=1, wait_s=60.0, group_id="g", model="judge"), "a")
    broker.ask(Release("release", "a", 1, 1, model="judge"))
    assert len(broker.handler._waiting) == 1, "other jobs of the group come first for a time"
    broker.pass_time(PRECEDENCE_S - 1.0, x=2)
    assert len(broker.handler._waiting) == 1
    broker.pass_time(PRECEDENCE_S, x=2)
    assert broker.handler._waiting == {}


def test_the_queue_of_a_removed_adapter_is_forgotten() -> None:
    broker = TwoModels()
    broker.ask(Assign("a", owner="run", job_id="a", attempt=1, wait_s=60.0, group_id="g", model="judge"), "a")
    broker.ask(Release("release", "a", 1, 1, model="judge"))
    broker.ask(WeightUpdate("remove", "remove", 1, model="judge"))
    assert broker.handler._waiting == {}


def test_a_job_learns_how_old_its_group_is() -> None:
    broker = Broker()
    broker.add(room=2)
    ages = {}

    def ask(job: str, group: str) -> None:
        request = Assign(job, owner="run", job_id=job, attempt=1, wait_s=60.0, group_id=group)
        reply = broker.ask(request, job)
        assert isinstance(reply, Assigned)
        ages[job] = reply.group_age_s

    ask("a", "g")
    broker.pass_time(7.0, x=4)
    ask("b", "g")
    ask("c", "other")
    ask("d", "")
    ask("a", "g")
    assert ages == {"a": 7.0, "b": 7.0, "c": 0.0, "d": 0.0}


def test_a_job_that_gets_a_backend_gets_one_of_another_model_in_the_same_pass() -> None:
    """That one has no room, but the job needs none once it holds a backend; it waited for the next tick."""
    broker = Broker()
    broker.add("small", room=1, name="judge")
    broker.ask_for("judge", "a")
    broker.add(room=1)
    broker.assign("first")
    broker.ask_for("judge", "b")
    broker.assign("b")
    assert set(broker.backends) == {"a/judge", "first"}
    broker.release("first")
    assert set(broker.backends) == {"a/judge", "b", "b/judge"}
