"""The backend handler through updates of weights, against the few words that say what is promised of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.machines import few_and_many

from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.errors import NoBackend, UpdateInProgress, UpdateNotBegun
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    Assign,
    Assigned,
    Backend,
    BackendAlive,
    BackendList,
    ListBackends,
    Release,
    RemoveBackend,
)
from prorl_zmq.wire.messages.base import Refused
from prorl_zmq.wire.messages.engines import WeightUpdate

if TYPE_CHECKING:
    from hypothesis import settings

NAMES = st.sampled_from("xyz")
JOBS = st.sampled_from([f"job-{number}" for number in range(6)])
VERSIONS = st.integers(0, 4)
LIMIT_S = 10.0
WAIT_S = 25.0


class UpdateMachine(RuleBasedStateMachine):
    """Nobody is given a backend that is behind, and nobody waits for ever.

    Engine hosts do what they are asked, but end updates only to the weights that they serve.
    """

    @initialize()
    def start(self) -> None:
        self.handler = BackendRequestHandler(lease_s=1e9)
        self.now = 0.0
        self.asked = 0
        self.begun: int | None = None
        self.until = 0.0
        self.wanted = 0
        self.waiting: dict[str, float] = {}
        self.holding: dict[str, str] = {}

    def ask(self, request: Any, client: bytes = b"trainer") -> Any:
        """Give the reply; hand the assignments that came with it to their jobs."""
        reply = None
        self.asked += 1
        serving = {status.backend.endpoint: status.backend.weight_version for status in self.listed()}
        unique = msgspec.structs.replace(request, request_id=f"r-{self.asked}")
        answers = self.handler.handle([client, b""], unique, self.now)
        for call in self.handler.weights.take_calls():
            version = call.request.weight_version
            late = call.request.step == "end" and serving[call.address.endpoint] != version
            error = UpdateNotBegun("no update was begun here") if late else None
            answers += self.handler.engine_answered(call.request.request_id, error, self.now)
        for answer in answers:
            if answer.envelope[0] == b"trainer":
                reply = answer.reply
            else:
                self.check(bytes(answer.envelope[0]).decode(), answer.reply)
        return reply

    def check(self, job_id: str, reply: Any) -> None:
        since = self.waiting.pop(job_id)
        if isinstance(reply, Refused):
            assert self.now - since >= WAIT_S, "its wait was not over"
            return
        assert isinstance(reply, Assigned)
        name = reply.backend.backend_id
        self.holding[job_id] = name
        (status,) = [one for one in self.listed() if one.backend.backend_id == name]
        version = status.backend.weight_version
        if self.begun is not None:
            assert version == self.begun, "no new job for a backend that is behind"
        else:
            assert version >= self.wanted, "no new job for a backend that is behind"

    def listed(self) -> Any:
        (answer,) = self.handler.handle([b"look", b""], ListBackends("list"), self.now)
        assert isinstance(answer.reply, BackendList)
        return answer.reply.backends

    def refused(self, reply: Any, error: type[Any]) -> bool:
        return isinstance(reply, Refused) and reply.error.code == error.code

    @rule(version=VERSIONS)
    def begin(self, version: int) -> None:
        other, none = self.begun not in (None, version), not self.listed()
        if not other and not none:
            self.begun, self.until = version, self.now + LIMIT_S
        reply = self.ask(WeightUpdate("begin", "begin", version, limit_s=LIMIT_S))
        assert self.refused(reply, UpdateInProgress) == (other and not none)
        assert self.refused(reply, NoBackend) == none

    @rule(version=VERSIONS)
    def end(self, version: int) -> None:
        begun, none = self.begun, not self.listed()
        served = any(status.backend.weight_version == version for status in self.listed())
        ends = served and (begun == version or (begun is None and version >= self.wanted))
        if ends:
            self.begun, self.wanted = None, version
        reply = self.ask(WeightUpdate("end", "end", version))
        other = served and begun not in (None, version)
        assert self.refused(reply, NoBackend) == none
        assert self.refused(reply, UpdateInProgress) == other
        assert self.refused(reply, UpdateNotBegun) == (not ends and not other and not none)

    @rule(version=VERSIONS)
    def cancel(self, version: int) -> None:
        other, none = self.begun not in (None, version), not self.listed()
        if not other and not none:
            self.begun = None
        reply = self.ask(WeightUpdate("cancel", "cancel", version))
        assert self.refused(reply, UpdateInProgress) == (other and not none)
        assert self.refused(reply, NoBackend) == none

    @rule(name=NAMES, version=VERSIONS, by_itself=st.booleans())
    def add(self, name: str, version: int, by_itself: bool) -> None:
        backend = Backend(backend_id=name, endpoint=f"ipc://{name}", weight_version=version)
        self.ask(AddBackend("add", backend, heartbeats=by_itself))

    @rule(name=NAMES, version=VERSIONS)
    def alive(self, name: str, version: int) -> None:
        self.ask(BackendAlive("alive", name, version))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.ask(RemoveBackend("remove", name))
        self.holding = {job_id: held for job_id, held in self.holding.items() if held != name}

    @rule(name=st.none() | NAMES, version=VERSIONS)
    def set_version(self, name: str | None, version: int) -> None:
        names = {status.backend.backend_id for status in self.listed()}
        known = name in names if name is not None else bool(names)
        refused = known and self.begun is not None and (name is None or version != self.begun)
        if name is None and known and not refused:
            self.wanted = version
        reply = self.ask(WeightUpdate("set", "set", version, backend_id=name))
        assert self.refused(reply, UpdateInProgress) == refused
        assert isinstance(reply, Refused) == (refused or not known)

    @rule(job_id=JOBS)
    def assign(self, job_id: str) -> None:
        if job_id not in self.holding:
            self.waiting.setdefault(job_id, self.now)
            request = Assign("assign", owner="run", job_id=job_id, attempt=1, wait_s=WAIT_S)
            self.ask(request, job_id.encode())

    @rule(job_id=JOBS)
    def release(self, job_id: str) -> None:
        self.holding.pop(job_id, None)
        self.waiting.pop(job_id, None)
        self.ask(Release("release", job_id, 1))

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.begun is not None and self.until <= self.now:
            self.begun = None
        for envelope, reply in self.handler.tick(self.now):
            self.check(bytes(envelope[0]).decode(), reply)

    @invariant()
    def states_say_who_is_behind(self) -> None:
        listed = self.listed()
        for status in listed:
            version = status.backend.weight_version
            assert (status.state == "updating") == (self.begun not in (None, version))
            if status.state == "ready" and self.begun is None:
                assert version >= self.wanted
            if status.state != "ready":
                assert status.problem
        assert not (self.waiting and any(status.state == "ready" for status in listed)), "jobs wait for nothing"
        assert all(self.now - since < WAIT_S + 11.0 for since in self.waiting.values())


@few_and_many(10)
def test_weight_update(runs: settings) -> None:
    run_state_machine_as_test(UpdateMachine, settings=runs)
