"""The line to the backend broker, with a real one at its other end."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Literal

import pytest
import zmq

from prorl_zmq import Job
from prorl_zmq.brokers.backends.backend_broker import BackendBroker
from prorl_zmq.config import BackendBrokerSettings, ServiceSettings, Topology
from prorl_zmq.errors import NoBackend
from prorl_zmq.stages.backend_client import BackendClient
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import (
    AddBackend,
    AnyBackendReply,
    Backend,
    BackendList,
    DrainBackend,
    EngineStart,
    ListBackends,
    RemoveBackend,
    ReportStarts,
)
from prorl_zmq.wire.messages.base import Done
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.sockets import connect, open_socket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from prorl_zmq.wire.messages.backends import AnyBackendRequest

LIMIT_S = 30.0


class Broker:
    """A backend broker in a thread, and someone who adds backends."""

    def __init__(self, folder: str) -> None:
        settings = BackendBrokerSettings(affinity="group")
        self._broker = BackendBroker(Topology(service=ServiceSettings(run_dir=folder), backend_broker=settings))
        self.endpoint = self._broker.endpoint
        self._thread = threading.Thread(target=self._broker.run)
        self._thread.start()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._line = open_socket(self.context, zmq.REQ)
        self._line.rcvtimeo = int(1000 * LIMIT_S)
        connect(self._line, self.endpoint)

    def ask(self, request: AnyBackendRequest) -> AnyBackendReply:
        self._line.send(codec.encode(request))
        return codec.decode(self._line.recv(), AnyBackendReply)  # type: ignore[arg-type]

    def add(self, name: str, node: str = "local") -> None:
        backend = Backend(backend_id=name, endpoint=f"ipc://{name}", node=node)
        assert isinstance(self.ask(AddBackend("add", backend)), Done)

    def states(self) -> dict[str, tuple[str, int]]:
        listed = self.ask(ListBackends("list"))
        assert isinstance(listed, BackendList)
        return {status.backend.backend_id: (status.state, status.in_flight) for status in listed.backends}

    def close(self) -> None:
        self._broker.stop()
        self._thread.join(LIMIT_S)
        self.context.destroy(linger=0)
        assert not self._thread.is_alive()


@pytest.fixture
def broker() -> Iterator[Broker]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        broker = Broker(folder)
        try:
            yield broker
        finally:
            broker.close()


def run(broker: Broker, body: Callable[[BackendClient], Awaitable[None]], node: str = "local") -> None:
    async def main() -> None:
        client = BackendClient(broker.context, broker.endpoint, "run-1", node)
        try:
            async with asyncio.timeout(LIMIT_S):
                await body(client)
        finally:
            client.close()

    asyncio.run(main())


def job(name: str, group: str = "", wait_s: float = 20.0) -> Job:
    return Job(task="math", instance={}, job_id=name, group_id=group, backend_wait_s=wait_s)


def test_the_node_and_the_group_of_a_job_count(broker: Broker) -> None:
    broker.add("far", "n1")
    broker.add("near", "n2")

    async def body(client: BackendClient) -> None:
        assert (await client.assign(job("a", "g"), 1)).backend_id == "near"
        assert [(await client.assign(job(name, "g"), 1)).backend_id for name in "bcd"] == ["near"] * 3
        assert (await client.assign(job("e"), 1)).backend_id == "far"

    run(broker, body, "n2")


def test_the_tokenizers_of_all_backends_are_listed(broker: Broker) -> None:
    broker.add("plain")
    chat = ChatSettings(kind="transformers", tokenizer="/models/x")
    assert isinstance(broker.ask(AddBackend("add", Backend(backend_id="x", endpoint="ipc://x", chat=chat))), Done)

    async def body(client: BackendClient) -> None:
        assert await client.tokenizers() == {"", "/models/x"}

    run(broker, body)


def test_a_job_is_given_another_backend_than_the_one_that_failed(broker: Broker) -> None:
    broker.add("x")
    broker.add("y")

    async def body(client: BackendClient) -> None:
        assert (await client.assign(job("a"), 1)).backend_id == "x"
        client.report_failure("a", Backend(backend_id="x", endpoint="ipc://x"), "it coughs" * 1000)
        assert (await client.assign(job("a"), 1, leaving="x")).backend_id == "y"
        assert (await client.assign(job("a"), 1)).backend_id == "y", "it keeps that one"
        assert (await client.assign(job("a"), 1, leaving="x")).backend_id == "y", "it has left that one already"
        assert broker.states() == {"x": ("probation", 0), "y": ("ready", 1)}
        client.release("a", 1)
        assert (await client.assign(job("b"), 1)).backend_id == "y"
        assert broker.states() == {"x": ("probation", 0), "y": ("ready", 1)}

    run(broker, body)


def test_the_only_backend_is_given_again_and_is_ready_once_it_has_served(broker: Broker) -> None:
    broker.add("x")

    async def body(client: BackendClient) -> None:
        await client.assign(job("a"), 1)
        client.report_failure("a", Backend(backend_id="x", endpoint="ipc://x"), "it coughs")
        assert (await client.assign(job("a"), 1, leaving="x")).backend_id == "x"
        assert broker.states() == {"x": ("probation", 1)}
        client.note_served("a", 2)
        client.note_served("unheard-of", 1)
        client.keep_alive()
        await client.assign(job("a"), 1)  # its answer comes behind what was said before
        assert broker.states() == {"x": ("probation", 1)}
        client.note_served("a", 1)
        client.keep_alive()
        assert (await client.assign(job("b"), 1)).backend_id == "x"
        assert broker.states() == {"x": ("ready", 2)}

    run(broker, body)


def test_a_job_waits_for_another_backend_as_long_as_it_allows(broker: Broker) -> None:
    broker.add("x")

    async def body(client: BackendClient) -> None:
        await client.assign(job("a"), 1)
        await client.assign(job("b"), 1)
        broker.ask(DrainBackend("drain", "x"))
        with pytest.raises(NoBackend) as refused:
            await client.assign(job("a", wait_s=0.2), 1, leaving="x")
        assert refused.value.fields["job_id"] == "a"
        moving = asyncio.create_task(client.assign(job("b"), 1, leaving="x"))
        await asyncio.sleep(0)  # it has asked: the request is on the wire before the next one
        broker.ask(RemoveBackend("remove", "x"))
        broker.add("y")
        assert (await moving).backend_id == "y"

    run(broker, body)


def test_the_end_of_an_older_attempt_ended_the_assignment_of_the_newer_one(broker: Broker) -> None:
    broker.add("x")

    async def body(client: BackendClient) -> None:
        for attempt in (1, 2):
            await client.assign(job("a"), attempt)
        client.release("a", 1)
        client.keep_alive()
        await client.assign(job("b"), 1)  # its answer comes behind what was said before
        assert broker.states() == {"x": ("ready", 2)}
        client.release("a", 2)
        await client.assign(job("b"), 1)
        assert broker.states() == {"x": ("ready", 1)}

    run(broker, body)


def test_a_job_waits_for_a_backend_that_is_starting_longer_than_it_allows(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RESEND_S", "REPLY_SLACK_S"):
        monkeypatch.setattr(f"prorl_zmq.stages.backend_client.{name}", 0.2)
    told: list[None] = []

    def report(state: Literal["starting", "failed"]) -> None:
        broker.ask(ReportStarts("starts", "supervisor", (EngineStart("x", state, "no memory"),)))

    async def body(client: BackendClient) -> None:
        report("starting")
        waiting = asyncio.create_task(client.assign(job("a", wait_s=0.2), 1, lambda: told.append(None)))
        refused = asyncio.create_task(client.assign(job("b", wait_s=0.2), 1))
        await asyncio.sleep(1.5)
        assert told
        assert not waiting.done()
        assert not refused.done()
        broker.add("x")
        assert (await waiting).backend_id == "x"
        assert (await refused).backend_id == "x"
        client.release("a", 1)
        client.release("b", 1)
        broker.ask(RemoveBackend("remove", "x"))
        report("failed")
        with pytest.raises(NoBackend, match="engine x failed to start: no memory"):
            await client.assign(job("c", wait_s=0.2), 1)

    run(broker, body)


def test_a_broker_that_lost_assignments_asks_for_them_at_the_next_heartbeat(broker: Broker) -> None:
    broker.add("x")

    async def body(client: BackendClient) -> None:
        await client.assign(job("a"), 1)
        client.keep_alive()
        await client.assign(job("b"), 1)  # answered after the heartbeat
        broker.ask(RemoveBackend("remove", "x"))
        broker.add("x")
        assert broker.states() == {"x": ("ready", 0)}
        client.keep_alive()
        await asyncio.to_thread(until_it_has, 2)

    def until_it_has(jobs: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while broker.states() != {"x": ("ready", jobs)}:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    run(broker, body)


def counted(client: BackendClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that has an item for each time that the broker is asked for its backends."""
    asked: list[str] = []
    listed = client._listed

    async def list_backends() -> list[Backend]:
        asked.append("list")
        return await listed()

    monkeypatch.setattr(client, "_listed", list_backends)
    return asked


def test_many_rollouts_that_begin_at_once_ask_once_for_their_teacher(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.add("x")

    async def body(client: BackendClient) -> None:
        asked = counted(client, monkeypatch)
        for model, names in (("policy", ["x"]), ("teacher", [])):
            asked.clear()
            for found in await asyncio.gather(*(client.of_model(model) for _ in range(8))):
                assert [one.backend_id for one in found] == names
            await client.of_model(model)
            assert asked == ["list"]

    run(broker, body)


def test_rollouts_that_ask_for_their_teacher_in_vain_wait_together(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(client: BackendClient) -> None:
        async def in_vain() -> list[Backend]:
            raise NoBackend("the backend broker did not answer")

        monkeypatch.setattr(client, "_listed", in_vain)
        asked = counted(client, monkeypatch)
        failed = await asyncio.gather(*(client.of_model("teacher") for _ in range(8)), return_exceptions=True)
        assert [type(one) for one in failed] == [NoBackend] * 8
        assert asked == ["list"]
        monkeypatch.undo()
        assert await client.of_model("teacher") == ()

    run(broker, body)
