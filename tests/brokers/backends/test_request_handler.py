from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.brokers.backends import backend_registry
from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.errors import UpdateNotBegun
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    BackendList,
    BackendRefused,
    BeginWeights,
    CancelWeights,
    ChatSettings,
    ClearBackends,
    Done,
    DrainBackend,
    EndWeights,
    EngineLoad,
    GenerationFailed,
    HeldAssignment,
    ListBackends,
    OwnerAlive,
    Release,
    RemoveBackend,
    SetWeightVersion,
)
from prorl_zmq.wire.messages.engines import EndUpdate

if TYPE_CHECKING:
    from prorl_zmq.brokers.backends.backend_heap import Affinity

LEASE_S = 10.0


class Desk:
    """A request handler and what it answered: client name to reply. Engine hosts do what they are asked at once."""

    def __init__(self, affinity: Affinity = "job") -> None:
        self.desk = BackendRequestHandler(LEASE_S, affinity)
        self.now = 0.0
        self.late: set[str] = set()
        """Backends whose hosts had begun nothing when an update ends."""

    def ask(self, request: Any, client: bytes = b"client") -> dict[bytes, Any]:
        answers = self.desk.handle([client, b""], request, self.now)
        for call in self.desk.take_calls():
            late = isinstance(call.request, EndUpdate) and call.address.endpoint.removeprefix("ipc://") in self.late
            error = UpdateNotBegun(f"no update to weights {call.request.weight_version} was begun") if late else None
            answers += self.desk.engine_answered(call.request.request_id, error, self.now)
        return {bytes(answer.envelope[0]): answer.reply for answer in answers}

    def tick(self, now: float) -> dict[bytes, Any]:
        self.now = now
        return {bytes(answer.envelope[0]): answer.reply for answer in self.desk.tick(now)}

    def in_flight(self) -> dict[str, int]:
        reply = self.ask(ListBackends("list"))[b"client"]
        assert isinstance(reply, BackendList)
        return {status.backend.backend_id: status.in_flight for status in reply.backends}

    def listed(self, name: str = "x") -> tuple[str, int]:
        """The state and the weight version of one backend."""
        (found,) = (s for s in self.ask(ListBackends("list"))[b"client"].backends if s.backend.backend_id == name)
        return found.state, found.backend.weight_version


def add(name: str = "x", *, heartbeats: bool = False, endpoint: str = "", version: int = 0) -> AddBackend:
    backend = Backend(backend_id=name, endpoint=endpoint or f"ipc://{name}", weight_version=version)
    return AddBackend("add", backend, heartbeats)


def assign(
    job_id: str = "a",
    attempt: int = 1,
    owner: str = "run-1",
    wait_s: float = 60.0,
    group: str = "",
    leaving: str = "",
) -> Assign:
    return Assign(
        f"assign-{job_id}-{attempt}-{leaving}" if leaving else f"assign-{job_id}-{attempt}",
        owner=owner,
        job_id=job_id,
        attempt=attempt,
        wait_s=wait_s,
        group_id=group,
        leaving=leaving,
    )


def test_an_assignment_is_answered_with_the_backend() -> None:
    desk = Desk()
    assert desk.ask(add()) == {b"client": Done("add")}
    assert desk.ask(assign()) == {b"client": Assigned("assign-a-1", add().backend)}


def test_a_waiting_assignment_is_served_when_a_backend_is_added() -> None:
    desk = Desk()
    assert desk.ask(assign("a"), b"first") == {}
    assert desk.ask(assign("b"), b"second") == {}
    assert desk.ask(ListBackends("list"))[b"client"].waiting == 2
    answers = desk.ask(add())
    assert {client: type(reply) for client, reply in answers.items()} == {
        b"client": Done,
        b"first": Assigned,
        b"second": Assigned,
    }
    assert desk.in_flight() == {"x": 2}


def test_an_assignment_that_waited_as_long_as_its_job_allows_is_refused() -> None:
    desk = Desk()
    desk.ask(assign(wait_s=5.0))
    assert desk.desk.next_deadline() == 5.0
    assert desk.tick(4.9) == {}
    reply = desk.tick(5.0)[b"client"]
    assert isinstance(reply, BackendRefused)
    assert reply.error.code == "no_backend"
    assert reply.error.fields == {"job_id": "a", "waited_s": 5.0}
    assert desk.desk.next_deadline() is None
    assert desk.ask(add()) == {b"client": Done("add")}


def test_asking_again_does_not_start_the_wait_anew() -> None:
    desk = Desk()
    desk.ask(assign(wait_s=12.0))
    for desk.now in (5.0, 10.0):
        assert desk.ask(assign(wait_s=12.0), b"reconnected") == {}
    assert desk.desk.next_deadline() == 12.0
    assert isinstance(desk.tick(12.0)[b"reconnected"], BackendRefused)


def test_of_two_attempts_that_wait_the_newer_one_is_served() -> None:
    desk = Desk()
    desk.ask(assign(attempt=2), b"new")
    desk.ask(assign(attempt=1), b"old")
    assert list(desk.ask(add())) == [b"client", b"new"]


def test_a_release_withdraws_a_waiting_assignment_unless_it_is_older() -> None:
    desk = Desk()
    desk.ask(assign("a", attempt=2))
    desk.ask(Release("release", "a", 1))
    assert desk.ask(ListBackends("list"))[b"client"].waiting == 1
    desk.ask(Release("release", "a", 2))
    assert desk.ask(ListBackends("list"))[b"client"].waiting == 0


def test_a_draining_backend_lets_jobs_wait() -> None:
    desk = Desk()
    desk.ask(add())
    desk.ask(DrainBackend("drain", "x"))
    assert desk.ask(assign()) == {}


def test_the_assignments_of_a_silent_owner_are_released() -> None:
    desk = Desk()
    desk.ask(add())
    desk.ask(assign("a", owner="dead"))
    desk.ask(assign("b", owner="alive"))
    desk.now = 9.0
    desk.ask(OwnerAlive("alive", "alive", {"b": HeldAssignment(1, "x")}))
    desk.tick(LEASE_S)
    assert desk.in_flight() == {"x": 1}
    desk.ask(OwnerAlive("alive", "alive", {}))
    assert desk.in_flight() == {"x": 0}


def test_a_broker_that_was_started_anew_learns_which_jobs_are_where() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(add("y"))
    jobs = {"a": HeldAssignment(1, "y", 3), "b": HeldAssignment(2, "y"), "waits": HeldAssignment(1)}
    for _ in range(2):
        desk.ask(OwnerAlive("alive", "run-1", jobs))
    assert desk.in_flight() == {"x": 0, "y": 2}
    assert desk.ask(assign("b", attempt=2))[b"client"].backend.backend_id == "y"
    desk.tick(LEASE_S)
    assert desk.in_flight() == {"x": 0, "y": 0}


def test_an_owner_that_died_while_it_waited_does_not_keep_what_it_is_given_later() -> None:
    desk = Desk()
    desk.ask(assign("a", owner="dead", wait_s=60.0), b"dead")
    desk.tick(2 * LEASE_S)
    desk.ask(add())
    assert desk.in_flight() == {"x": 1}
    desk.tick(3 * LEASE_S)
    assert desk.in_flight() == {"x": 0}


def test_a_silent_engine_host_is_removed_and_has_to_register_again() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(add("static"))
    desk.now = 9.0
    assert desk.ask(BackendAlive("alive", "x", 3)) == {b"client": Done("alive")}
    assert desk.ask(ListBackends("list"))[b"client"].backends[0].backend.weight_version == 3
    desk.tick(18.9)
    assert set(desk.in_flight()) == {"x", "static"}
    desk.tick(19.0)
    assert set(desk.in_flight()) == {"static"}
    reply = desk.ask(BackendAlive("alive", "x", 3))[b"client"]
    assert isinstance(reply, BackendRefused)
    assert reply.error.code == "unknown_backend"


def test_a_host_that_was_dismissed_stays_removed_until_it_is_added_again() -> None:
    for dismissal in (RemoveBackend("remove", "x"), ClearBackends("clear")):
        desk = Desk()
        desk.ask(add(heartbeats=True))
        desk.ask(dismissal)
        assert desk.ask(BackendAlive("alive", "x", 1)) == {b"client": Done("alive")}
        assert desk.in_flight() == {}
        desk.ask(add(heartbeats=True))
        desk.ask(BackendAlive("alive", "x", 1))
        assert desk.in_flight() == {"x": 0}


def test_wrong_ids_are_refused_and_change_nothing() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    for request, code in (
        (add(endpoint="ipc://elsewhere"), "duplicate_backend"),
        (DrainBackend("r", "unknown"), "unknown_backend"),
        (RemoveBackend("r", "unknown"), "unknown_backend"),
        (SetWeightVersion("r", 1, "unknown"), "unknown_backend"),
        (BackendAlive("r", "unknown", 1), "unknown_backend"),
    ):
        before = desk.ask(ListBackends("list"))
        reply = desk.ask(request)[b"client"]
        assert isinstance(reply, BackendRefused)
        assert reply.error.code == code
        assert reply.request_id == request.request_id
        assert desk.ask(ListBackends("list")) == before


def test_a_job_that_holds_an_assignment_gets_the_same_again() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(add("y"))
    first = desk.ask(assign())[b"client"]
    assert desk.ask(assign())[b"client"] == first
    assert desk.in_flight() == {"x": 1, "y": 0}


@pytest.mark.parametrize(
    ("backend", "code"),
    [
        (Backend(backend_id="bad", endpoint="nonsense"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint=""), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint=f"ipc:///{'long' * 30}"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="tcp://127.0.0.1:*"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="tcp://*:5555"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="tcp://127.0.0.1:0"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="http://127.0.0.1:8000/v1"), "invalid_endpoint"),
        (Backend(backend_id="bad", endpoint="ipc://bad", chat=ChatSettings(kind="transformers")), "config_error"),
    ],
)
def test_a_backend_that_no_job_could_use_was_accepted(backend: Backend, code: str) -> None:
    desk = Desk()
    desk.ask(assign(), b"waits")
    answers = desk.ask(AddBackend("add", backend))
    assert list(answers) == [b"client"], "the job that waits is not given it"
    assert answers[b"client"].error.code == code
    assert desk.in_flight() == {}


def test_a_version_that_the_trainer_set_was_undone_by_the_next_heartbeat() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True, version=1))
    for backend_id, version in (("x", 7), (None, 8)):
        desk.ask(SetWeightVersion("set", version, backend_id))
        desk.ask(BackendAlive("alive", "x", 1))
        assert desk.listed() == ("ready", version)
    desk.ask(BackendAlive("alive", "x", 2))
    assert desk.listed() == ("ready", 2), "the host's own change counts"
    desk.ask(add(version=5))
    desk.ask(BackendAlive("alive", "x", 2))
    assert desk.listed() == ("ready", 2), "added by hand: the host knows better"


def test_an_engine_that_was_restarted_served_its_first_weights_unnoticed(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(BackendAlive("alive", "x", 7))
    desk.ask(add(heartbeats=True))  # killed and started again within the lease
    assert desk.listed() == ("draining", 0)
    assert "backend x came with weights 0 after it had served 7" in caplog.text
    assert desk.ask(assign()) == {}
    desk.ask(BackendAlive("alive", "x", 6))
    assert desk.listed() == ("draining", 6)
    desk.ask(add(heartbeats=True))  # and once more: it is still 7 that it has to reach
    assert isinstance(desk.ask(BackendAlive("alive", "x", 7), b"host")[b"client"], Assigned)
    assert desk.listed() == ("ready", 7)


def test_a_host_that_came_back_after_its_lease_was_not_held_to_its_weights() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True, version=7))
    desk.tick(LEASE_S)
    assert desk.in_flight() == {}
    desk.ask(add(heartbeats=True, endpoint="tcp://127.0.0.1:5555"))
    assert desk.listed() == ("draining", 0)
    desk.ask(SetWeightVersion("set", 8, "x"))
    desk.ask(BackendAlive("alive", "x", 0))
    assert desk.listed() == ("ready", 8)


@pytest.mark.parametrize("forget", [RemoveBackend("forget", "x"), ClearBackends("forget"), add()])
@pytest.mark.parametrize("lost", [False, True])
def test_a_version_is_forgotten_on_request(forget: Any, lost: bool) -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True, version=7))
    if lost:
        desk.tick(LEASE_S)
    assert isinstance(desk.ask(forget)[b"client"], Done)
    assert desk.ask(BackendAlive("alive", "x", 0)).keys() == {b"client"}
    desk.ask(add(heartbeats=True))
    if isinstance(forget, AddBackend):
        desk.ask(add())  # by hand, for the live host: it is wanted as it is
    assert desk.listed() == ("ready", 0)


def test_not_every_host_that_ever_was_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "LOST_LIMIT", 2)
    desk = Desk()
    for number, name in enumerate("xyz"):
        desk.ask(add(name, heartbeats=True, version=7))
        desk.tick((number + 1) * LEASE_S)
    for name in "xyz":
        desk.ask(add(name, heartbeats=True))
    assert [desk.listed(name)[0] for name in "xyz"] == ["ready", "draining", "draining"]


def test_an_http_server_is_refused_with_the_command_that_serves_it() -> None:
    reply = Desk().ask(add(endpoint="https://gpu-1:8000"))[b"client"]
    assert "`prorl-engine --engine http --url https://gpu-1:8000`" in reply.error.message


def test_the_jobs_of_a_group_get_one_backend_if_the_topology_says_so() -> None:
    by_group, by_job = Desk("group"), Desk("job")
    for desk in (by_group, by_job):
        for name in "xy":
            desk.ask(add(name))
        for job in "ab":
            desk.ask(assign(job, group="g"))
    assert by_group.in_flight() == {"x": 2, "y": 0}
    assert by_job.in_flight() == {"x": 1, "y": 1}


def test_the_last_load_of_a_host_is_listed() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(add("static"))
    load = EngineLoad(running=3, tokens_per_s=120.5, prompt_tokens=1000, cached_tokens=900, generated_tokens=70)
    loads = [[status.load for status in desk.ask(ListBackends("list"))[b"client"].backends]]
    desk.ask(BackendAlive("alive", "x", 0, load))
    loads.append([status.load for status in desk.ask(ListBackends("list"))[b"client"].backends])
    assert loads == [[EngineLoad(), None], [load, None]]


def failed(name: str = "x", job_id: str = "a") -> GenerationFailed:
    return GenerationFailed("failed", job_id, name, "it coughs")


def test_a_backend_that_failed_is_listed_with_its_problem_and_gets_one_job_at_a_time_at_growing_intervals() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(add("y"))
    assert desk.ask(assign("a"))[b"client"].backend.backend_id == "x"
    desk.ask(failed())
    assert desk.ask(assign("a", leaving="x"))[b"client"].backend.backend_id == "y"
    tried = []
    for tenth in range(1, 1300):
        desk.now = tenth / 10
        desk.tick(desk.now)
        given = desk.ask(assign(f"job-{tenth}"))[b"client"].backend.backend_id
        if given == "x":
            tried.append(desk.now)
            desk.ask(failed(job_id=f"job-{tenth}"))
            assert desk.ask(assign(f"job-{tenth}", leaving="x"))[b"client"].backend.backend_id == "y"
        status = desk.ask(ListBackends("list"))[b"client"].backends[0]
        assert (status.state, status.problem) == ("probation", "it coughs")
    assert tried == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0]
    assert status.next_try_s == pytest.approx(183.0 - desk.now)


def test_a_job_that_is_served_ends_the_probation() -> None:
    for served in (
        OwnerAlive("alive", "run-1", {"b": HeldAssignment(1, "x", 1)}),
        Release("release", "b", 1, 1),
    ):
        desk = Desk()
        desk.ask(add("x"))
        desk.ask(failed())
        desk.tick(1.0)
        assert isinstance(desk.ask(assign("b"))[b"client"], Assigned)
        assert desk.ask(assign("c"), b"c") == {}
        for silent in (OwnerAlive("alive", "run-1", {"b": HeldAssignment(1, "x")}), Release("release", "b", 0, 1)):
            assert list(desk.ask(silent)) == [b"client"]
        assert isinstance(desk.ask(served)[b"c"], Assigned)
        assert desk.listed()[0] == "ready"
        desk.ask(failed())
        desk.now = 2.0
        assert isinstance(desk.ask(assign("d"))[b"client"], Assigned), "the pause is the first one again"


def test_what_may_have_been_served_before_the_failure_does_not_end_a_probation() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(assign("held"))
    desk.ask(failed())
    for desk.now, served, state in ((1.9, 1, "probation"), (2.5, 1, "probation"), (2.6, 2, "ready")):
        desk.ask(OwnerAlive("alive", "run-1", {"held": HeldAssignment(1, "x", served)}))
        assert desk.listed()[0] == state


def test_many_failures_at_once_are_one() -> None:
    desk = Desk()
    desk.ask(add("x"))
    for number in range(64):
        desk.ask(failed(job_id=f"job-{number}"))
    desk.now = 1.0
    assert isinstance(desk.ask(assign("a"))[b"client"], Assigned)


@pytest.mark.parametrize("again", [add(), add(heartbeats=True)])
def test_a_backend_that_is_added_again_is_ready(again: Any) -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(failed())
    assert desk.ask(assign(), b"waits") == {}
    desk.ask(BackendAlive("alive", "x", 0))
    assert desk.listed()[0] == "probation", "its host lives, but that says little"
    assert isinstance(desk.ask(again)[b"waits"], Assigned)
    assert desk.listed()[0] == "ready"


def test_jobs_wait_while_all_are_on_probation_and_are_the_ones_that_try_them() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(assign("a"))
    desk.ask(failed())
    assert desk.ask(assign("a", leaving="x"), b"a") == {}
    assert desk.ask(assign("b"), b"b") == {}
    assert desk.desk.next_deadline() == 1.0
    assert [type(reply) for reply in desk.tick(1.0).values()] == [Assigned]
    assert desk.desk.next_deadline() == 3.0
    assert list(desk.tick(3.0)) == [b"b"]
    assert desk.desk.next_deadline() is None


def test_a_wait_ends_with_a_backend_that_may_work_rather_than_none() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(failed())
    desk.ask(assign("a", wait_s=0.5), b"a")
    assert isinstance(desk.tick(0.5)[b"a"], Assigned)
    desk.ask(DrainBackend("drain", "x"))
    desk.ask(assign("b", wait_s=0.5), b"b")
    assert desk.tick(1.0)[b"b"].error.code == "no_backend"


def test_the_failure_of_what_is_gone_changes_nothing() -> None:
    desk = Desk()
    assert desk.ask(failed()) == {b"client": Done("failed")}
    desk.ask(add("x"))
    desk.ask(failed())
    desk.ask(RemoveBackend("remove", "x"))
    desk.tick(5.0)
    desk.ask(add("x"))
    assert desk.listed()[0] == "ready"


@pytest.mark.parametrize("sent", [1, 2])
def test_a_job_that_waits_is_given_its_old_backend_once_that_is_back(sent: int) -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(assign())
    desk.ask(DrainBackend("drain", "x"))
    moving = assign(leaving="x")
    for _ in range(sent):
        assert desk.ask(moving) == {}
    assert desk.in_flight() == {"x": 0}
    answers = desk.ask(add("x"), b"adds")
    assert {client: type(reply) for client, reply in answers.items()} == {b"adds": Done, b"client": Assigned}
    assert isinstance(desk.ask(moving)[b"client"], Assigned), "the answer was lost"
    assert desk.in_flight() == {"x": 1}


def test_a_job_whose_backend_was_removed_gets_another() -> None:
    desk = Desk()
    desk.ask(add("x"))
    desk.ask(assign())
    desk.ask(add("y"))
    desk.ask(RemoveBackend("remove", "x"))
    moved = desk.ask(assign(leaving="x"))[b"client"]
    assert isinstance(moved, Assigned)
    assert moved.backend.backend_id == "y"


def test_an_unwell_backend_is_listed_with_its_problem_and_gets_no_jobs() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    assert desk.ask(assign("held"))[b"client"].backend.backend_id == "x"
    desk.ask(BackendAlive("alive", "x", 0, EngineLoad(), "it coughs"))
    (status,) = desk.ask(ListBackends("list"))[b"client"].backends
    assert (status.state, status.problem, status.in_flight) == ("unwell", "it coughs", 1)
    assert desk.ask(assign("b"), b"b") == {}
    answered = desk.ask(BackendAlive("alive", "x", 0), b"host")
    assert answered[b"b"].backend.backend_id == "x"
    assert desk.listed() == ("ready", 0)


def test_a_drained_host_that_fell_silent_drains_on_when_it_is_back() -> None:
    desk = Desk()
    desk.ask(add(heartbeats=True))
    desk.ask(DrainBackend("drain", "x"))
    desk.tick(LEASE_S)
    assert desk.in_flight() == {}
    desk.ask(add(heartbeats=True))
    assert desk.listed()[0] == "draining"
    desk.ask(add())
    assert desk.listed()[0] == "ready"


# Updates of weights -------------------------------------------------------------------------------------------------


def begun(*names: str) -> Desk:
    """A desk whose backends serve version 1 while version 2 is on its way."""
    desk = Desk()
    for name in names:
        desk.ask(add(name, heartbeats=True, version=1))
    assert desk.ask(BeginWeights("begin", 2, 100.0)) == {b"client": Done("begin")}
    return desk


def refusal(answers: dict[bytes, Any]) -> tuple[str, str]:
    reply = answers[b"client"]
    assert isinstance(reply, BackendRefused)
    return reply.error.code, reply.error.message


def test_jobs_wait_while_weights_are_on_their_way_for_the_backend_that_has_them_first() -> None:
    desk = begun("x", "y")
    assert desk.ask(assign("a"), b"first") == {}
    assert desk.listed("x") == ("updating", 1)
    given = desk.ask(BackendAlive("alive", "y", 2))[b"first"]
    assert given.backend.backend_id == "y"
    assert desk.ask(assign("b"), b"second")[b"second"].backend.backend_id == "y"
    desk.ask(SetWeightVersion("set", 2, "x"))
    assert desk.ask(assign("c"), b"third")[b"third"].backend.backend_id == "x"
    assert desk.ask(EndWeights("end", 2)) == {b"client": Done("end")}
    assert desk.ask(EndWeights("end", 2)) == {b"client": Done("end")}
    assert (desk.listed("x"), desk.listed("y")) == (("ready", 2), ("ready", 2))


def test_a_job_keeps_the_backend_that_it_has_while_weights_are_on_their_way() -> None:
    desk = Desk()
    desk.ask(add("x", version=1))
    desk.ask(assign("a"), b"first")
    desk.ask(BeginWeights("begin", 2, 100.0))
    assert desk.ask(assign("a"), b"first")[b"first"].backend.backend_id == "x"
    assert desk.ask(assign("a", attempt=2), b"first") == {}, "a new attempt is a new assignment"


def test_a_group_goes_back_to_its_backend_when_the_weights_are_there() -> None:
    desk = Desk("group")
    for name in "xyz":
        desk.ask(add(name, version=1))
    at = desk.ask(assign("a", group="g"))[b"client"].backend.backend_id
    desk.ask(BeginWeights("begin", 2, 100.0))
    desk.ask(assign("b", group="g"), b"second")
    for name in sorted("xyz", key=lambda name: name != at):
        answers = desk.ask(SetWeightVersion("set", 2, name))
        if b"second" in answers:
            assert answers[b"second"].backend.backend_id == at


def test_a_backend_that_joins_with_older_weights_gets_no_jobs_until_it_has_the_newer_ones() -> None:
    desk = begun("x")
    desk.ask(add("y", heartbeats=True, version=1))
    assert desk.listed("y") == ("updating", 1)
    desk.late = {"y"}
    desk.ask(EndWeights("end", 2))
    desk.ask(add("z", version=1))
    desk.ask(add("new", heartbeats=True, version=2))
    assert [desk.listed(name) for name in ("x", "y", "z", "new")] == [
        ("ready", 2),
        ("draining", 1),
        ("draining", 1),
        ("ready", 2),
    ]
    desk.ask(BackendAlive("alive", "y", 2))
    assert desk.listed("y") == ("ready", 2)
    desk.ask(SetWeightVersion("set", 1))
    assert desk.listed("z") == ("ready", 1), "the trainer went back to these"


def test_a_trainer_that_goes_back_to_older_weights_updates_all() -> None:
    desk = begun("x", "y")
    for name in ("x", "y"):
        desk.ask(SetWeightVersion("set", 2, name))
    desk.ask(EndWeights("end", 2))
    desk.ask(BeginWeights("begin", 1, 100.0))
    assert desk.listed("x") == ("updating", 2)
    desk.late = {"y"}
    desk.ask(EndWeights("end", 1))
    assert (desk.listed("x"), desk.listed("y")) == (("ready", 1), ("draining", 2))


def test_an_update_whose_end_does_not_come_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.ask(add("x", version=1))
    desk.ask(BeginWeights("begin", 2, 30.0))
    desk.ask(assign("a", wait_s=60.0), b"first")
    desk.tick(20.0)
    desk.ask(BeginWeights("again", 2, 30.0))
    assert desk.desk.next_deadline() == 50.0
    assert desk.tick(49.0) == {}
    assert desk.tick(50.0)[b"first"].backend.backend_id == "x"
    assert "did not end within 30 s and was given up" in caplog.text
    (status,) = desk.ask(ListBackends("list"))[b"client"].backends
    assert (status.state, status.backend.weight_version) == ("ready", 1)
    assert "update to weights 2 did not end" in status.problem
    desk.late = {"x"}
    assert refusal(desk.ask(EndWeights("end", 2)))[0] == "update_not_begun"
    desk.late = set()
    desk.ask(SetWeightVersion("set", 2, "x"))
    (status,) = desk.ask(ListBackends("list"))[b"client"].backends
    assert status.problem == ""
    assert desk.ask(EndWeights("late", 2)) == {b"client": Done("late")}, "it only came late"


def test_a_job_waits_for_new_weights_no_longer_than_it_allows() -> None:
    desk = begun("x")
    desk.ask(assign("a", wait_s=5.0), b"first")
    error = desk.tick(5.0)[b"first"].error
    assert error.code == "no_backend"
    assert "weights 2 are on their way" in error.message


def test_one_update_at_a_time_and_each_has_its_end() -> None:
    desk = begun("x")
    assert desk.ask(BeginWeights("again", 2, 100.0)) == {b"client": Done("again")}
    for other in (
        BeginWeights("r", 3, 100.0),
        EndWeights("r", 3),
        CancelWeights("r", 3),
        SetWeightVersion("r", 3, "x"),
        SetWeightVersion("r", 2),
    ):
        code, message = refusal(desk.ask(other))
        assert code == "update_in_progress"
        assert "an update to weights 2 was begun and has not ended" in message
    assert desk.ask(CancelWeights("cancel", 2)) == {b"client": Done("cancel")}
    assert desk.listed("x") == ("ready", 1)
    assert desk.ask(CancelWeights("cancel", 2)) == {b"client": Done("cancel")}
    desk.late = {"x"}
    code, message = refusal(desk.ask(EndWeights("end", 2)))
    assert code == "update_not_begun"
    assert "no update to weights 2 was begun" in message
