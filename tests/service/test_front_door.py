"""The front door over real sockets: both clients, bad frames, lost clients, and a broker that is started anew."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop
import zmq
from support.waiting import until

from prorl_zmq import AsyncRolloutClient, Job, RolloutClient, errors
from prorl_zmq.brokers.journal.journal import MemoryJournal
from prorl_zmq.client.requests import read_reply
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION, Refused, new_id
from prorl_zmq.wire.messages.front_door import Collect, Hello, Submit, Welcome
from prorl_zmq.wire.requester import RESEND_S

from .conftest import SMALL, TestService, in_process, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.testing import LocalService


@pytest.fixture
def dealer(small_service: TestService) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket at the front door."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(small_service.front_door)
    socket.rcvtimeo = 5000
    yield socket
    context.destroy(linger=0)


def ask(socket: zmq.Socket[bytes], *frames: bytes) -> Any:
    """Send a message as a DEALER does, and read the reply or raise what it refuses with."""
    socket.send_multipart([b"", *frames])
    return read_reply(socket.recv_multipart()[1:])


MANY = 10 * 2**20


@pytest.mark.parametrize(
    ("frame", "repeated"),
    [
        (b"hello", b""),
        (b"", b""),
        (b"\xc1", b""),
        (b"\xdf\xff\xff\xff\xff", b""),
        (b"", b"\x91"),
        (b"\xdd" + MANY.to_bytes(4, "big"), b"\x80"),
        (codec.pack(7), b""),
        (codec.pack({"type": "no", "protocol": PROTOCOL_VERSION}), b""),
    ],
    ids=["text", "empty", "reserved", "map of 2^32", "nested", "empty maps", "number", "unknown type"],
)
def test_bad_frame_is_refused_and_the_door_stays_open(dealer: zmq.Socket[bytes], frame: bytes, repeated: bytes) -> None:
    with pytest.raises(errors.MalformedMessage):
        ask(dealer, frame + MANY * repeated)
    assert isinstance(ask(dealer, codec.encode(Hello("again"))), Welcome)


def test_wrong_number_of_frames(dealer: zmq.Socket[bytes]) -> None:
    with pytest.raises(errors.MalformedMessage, match="2 unexpected frames"):
        ask(dealer, codec.encode(Hello("one")), b"more", b"and more")
    dealer.send_multipart([b"no delimiter", codec.encode(Hello("two"))])
    dealer.send(b"")
    assert isinstance(ask(dealer, codec.encode(Hello("three"))), Welcome)


def test_other_protocol_version_is_refused_by_name(dealer: zmq.Socket[bytes]) -> None:
    with pytest.raises(errors.VersionMismatch) as caught:
        ask(dealer, codec.encode(Hello("one", protocol=99)))
    assert (caught.value.ours, caught.value.theirs) == (PROTOCOL_VERSION, 99)


def test_refusal_carries_the_request_id(dealer: zmq.Socket[bytes]) -> None:
    content = {"type": "submit", "request_id": "mine", "protocol": PROTOCOL_VERSION, "session": 7}
    dealer.send_multipart([b"", codec.pack(content)])
    reply = codec.decode(dealer.recv_multipart()[1], Refused)
    assert reply.request_id == "mine"
    assert reply.error.fields["field"] == "$.session"


def test_before_any_stage_process_the_service_is_busy(small_service: TestService) -> None:
    with small_service.client() as client, pytest.raises(errors.Busy) as caught:
        client.submit(scripted(), timeout_s=0.5)
    assert caught.value.retry_after_s > 0


class TestJobs:
    """What is wrong with a job is said before it is accepted, and nothing of its request is."""

    def test_unknown_task(self, shared_service: LocalService) -> None:
        with shared_service.client() as client, pytest.raises(errors.UnknownTask, match="served: scripted"):
            client.submit(Job(task="chess", instance={}))

    def test_wrong_field_is_named_and_nothing_is_accepted(self, shared_service: LocalService) -> None:
        wrong = Job(task="scripted", instance={"init": "", "colour": "red"})
        with shared_service.client() as client:
            with pytest.raises(errors.InvalidJob) as caught:
                client.submit([scripted(), wrong])
            assert (caught.value.field, caught.value.job_id) == ("colour", wrong.job_id)
            assert client.collect(wait_s=0.2) == []
            assert list(client.stream()) == []

    def test_wrong_type_is_named(self, shared_service: LocalService) -> None:
        with shared_service.client() as client, pytest.raises(errors.InvalidJob) as caught:
            client.submit(Job(task="scripted", instance={"run": 3}))
        assert caught.value.field == "run"

    def test_too_large(self, small_service: TestService, dealer: zmq.Socket[bytes]) -> None:
        large = scripted(command="x" * 5000)
        with small_service.client() as client, pytest.raises(errors.JobTooLarge) as caught:
            client.submit(large)
        assert caught.value.limit_bytes == 4096
        with pytest.raises(errors.JobTooLarge):
            ask(dealer, codec.encode(Submit("one", "mine")), codec.encode(large))

    def test_not_plain_data(self, shared_service: LocalService) -> None:
        with shared_service.client() as client, pytest.raises((errors.MalformedMessage, TypeError)):
            client.submit(Job(task="scripted", instance={"init": object()}))

    def test_the_same_job_twice_is_one_job_and_another_of_its_id_is_refused(self, shared_service: LocalService) -> None:
        job = scripted()
        with shared_service.client() as client:
            client.submit([job, job])
            client.submit(job)
            other = Job(task="scripted", instance={"init": "raise"}, job_id=job.job_id)
            with pytest.raises(errors.DuplicateJob):
                client.submit(other)
            assert [trajectory.job_id for trajectory in client.stream()] == [job.job_id]

    def test_full_service_is_busy_until_results_are_collected(self) -> None:
        with in_process(topology={"rollout_broker": SMALL}) as small_service, small_service.client() as client:
            client.submit(scripted() for _ in range(10))
            with pytest.raises(errors.Busy):
                client.submit(scripted(), timeout_s=0.5)
            assert len(list(client.stream())) == 10
            client.submit(scripted())
            assert len(list(client.stream())) == 1


def test_client_that_dies_before_its_reply_loses_nothing(shared_service: LocalService) -> None:
    """A REQ client asks for results and goes away; another of its session gets them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    request = context.socket(zmq.REQ)
    request.connect(shared_service.front_door)
    request.send(codec.encode(Collect(new_id(), "ours", "the-dead", wait_s=30.0)))
    with shared_service.client(session="ours") as client:
        until(lambda: client.status(), "the shared_service to have read the request")
        context.destroy(linger=0)
        ids = set(client.submit(scripted() for _ in range(5)))
        got = {trajectory.job_id for trajectory in client.stream(timeout_s=50)}
    assert got == ids


def test_results_wait_for_the_session_of_a_client_that_was_closed(shared_service: LocalService) -> None:
    with shared_service.client(session="run-7") as first:
        ids = set(first.submit(scripted() for _ in range(6)))
        taken = {trajectory.job_id for trajectory in first.collect(1, wait_s=10)}
    with shared_service.client(session="run-7") as second:
        rest = [trajectory.job_id for trajectory in second.stream(timeout_s=50)]
    assert taken
    assert sorted([*taken, *rest]) == sorted(ids)


def test_sessions_do_not_see_each_others_results(local_service: LocalService) -> None:
    with local_service.client() as ours, local_service.client() as theirs:
        ids = ours.submit([scripted(), scripted()])
        until(lambda: ours.status().uncollected == 2, "both jobs to end")
        assert theirs.collect(wait_s=0.0) == []
        assert sorted(trajectory.job_id for trajectory in ours.stream()) == sorted(ids)


def test_breaking_off_a_stream_keeps_what_was_not_taken(local_service: LocalService) -> None:
    with local_service.client() as client:
        ids = client.submit(scripted() for _ in range(10))
        until(lambda: client.status().uncollected == 10, "all jobs to end")
        first = next(iter(client.stream()))
        rest = list(client.stream())
    assert sorted([first.job_id, *(trajectory.job_id for trajectory in rest)]) == sorted(ids)


def test_clients_live_through_a_restart_of_the_broker(local_service: LocalService) -> None:
    with local_service.client() as client:
        ids = client.submit(scripted() for _ in range(20))
        first = client.collect(5, wait_s=10)
        local_service.brokers.stop("rollout")
        local_service.brokers.start_rollout_broker()
        rest = list(client.stream(timeout_s=60))
        assert sorted(trajectory.job_id for trajectory in [*first, *rest]) == sorted(ids)
        assert {trajectory.outcome for trajectory in [*first, *rest]} == {"completed"}
        assert client.submit(scripted())


def test_jobs_of_a_journal_that_is_gone_are_said_to_be_lost(local_service: LocalService) -> None:
    """Silence would look like the end of the stream."""
    with local_service.client() as client:
        done = client.submit(scripted() for _ in range(3))
        until(lambda: client.status().uncollected == 3, "three jobs to end")
        first = client.collect(1)
        lost = client.submit(scripted(run="sleep") for _ in range(2))
        local_service.brokers.stop("rollout")
        local_service.brokers.journal = MemoryJournal()
        local_service.brokers.start_rollout_broker()
        with pytest.raises(errors.JobsLost) as caught:
            list(client.stream(timeout_s=30))
        missing = {*done, *lost} - {trajectory.job_id for trajectory in first}
        assert caught.value.count == len(missing)
        assert set(caught.value.job_ids.split()) == missing
        again = client.submit(scripted())
        assert [trajectory.job_id for trajectory in client.stream(timeout_s=30)] == again


def test_id_that_comes_again_after_its_job_has_ended_is_a_job_of_its_own(shared_service: LocalService) -> None:
    first, second = scripted(), scripted(eval="raise")
    second = msgspec.structs.replace(second, job_id=first.job_id)
    with shared_service.client() as client:
        client.submit(first)
        assert [trajectory.outcome for trajectory in client.stream(timeout_s=20)] == ["completed"]
        client.submit(second)
        assert [trajectory.outcome for trajectory in client.stream(timeout_s=20)] == ["failed"]


def test_client_that_closes_gives_back_what_it_had_not_handed_over(local_service: LocalService) -> None:
    with local_service.client(session="run-8") as first:
        ids = first.submit(scripted() for _ in range(10))
        until(lambda: first.status().uncollected == 10, "all jobs to end")
        taken = next(iter(first.stream()))
    with local_service.client(session="run-8") as second:
        rest = [trajectory.job_id for trajectory in second.stream(timeout_s=5)]
    assert sorted([taken.job_id, *rest]) == sorted(ids)


def test_client_that_was_there_before_the_service(empty_service: TestService) -> None:
    """The first sending's reply comes late and is dropped by REQ; the client must not mind."""
    with empty_service.client() as client:
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(client.status(timeout_s=30)))
        waiting.start()
        waiting.join(1.5 * RESEND_S)
        empty_service.brokers.start_rollout_broker()
        waiting.join(30.0)
        assert len(answers) == 1


def test_no_service_is_a_timeout(tmp_path: Any) -> None:
    with (
        RolloutClient(f"ipc://{tmp_path}/door", timeout_s=0.3) as client,
        pytest.raises(errors.RequestTimeout, match="is the service running"),
    ):
        client.status()


def test_closed_client_says_so(shared_service: LocalService) -> None:
    client = shared_service.client()
    client.close()
    client.close()
    with pytest.raises(errors.Closed):
        client.status()


def test_cancel_of_unknown_finished_and_repeated_ids(local_service: LocalService) -> None:
    with local_service.client() as client:
        (done,) = client.submit(scripted())
        until(lambda: client.status().uncollected == 1, "the job to end")
        (going,) = client.submit(scripted(run="sleep"))
        assert client.cancel([going, done, "never-was"]) == {
            going: "cancelled",
            done: "finished",
            "never-was": "unknown",
        }
        assert client.cancel(going) == {going: "finished"}
        outcomes = {trajectory.job_id: trajectory.outcome for trajectory in client.stream()}
        assert outcomes == {done: "completed", going: "cancelled"}


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_asynchronous_client(shared_service: LocalService, new_loop: Any) -> None:
    async def use() -> None:
        async with AsyncRolloutClient(shared_service.front_door) as client:
            ids = await client.submit(scripted() for _ in range(30))
            (sleeper,) = await client.submit(scripted(run="sleep"))
            statuses = await asyncio.gather(*(client.status() for _ in range(20)))
            assert len(statuses) == 20
            some = await client.collect(10, wait_s=10)
            assert 1 <= len(some) <= 10
            assert await client.cancel(sleeper) == {sleeper: "cancelled"}
            rest = [trajectory async for trajectory in client.stream(timeout_s=20)]
            assert sorted(trajectory.job_id for trajectory in [*some, *rest]) == sorted([*ids, sleeper])
            with pytest.raises(errors.UnknownTask):
                await client.submit(Job(task="chess", instance={}))
            assert await client.backends.list() == ()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(use())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_submit_whose_reply_was_lost_runs_nothing_twice(local_service: LocalService, restarted: bool) -> None:
    """Meanwhile another task of the client had collected and acknowledged what it brought, which the broker forgot."""
    job = msgspec.structs.replace(scripted(), job_id="once")
    request = codec.encode(Submit("sent-twice", "mine"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = 10_000
    socket.connect(local_service.front_door)
    try:
        first = ask(socket, request, codec.encode(job))
        with local_service.client(session="mine") as client:
            assert [one.job_id for one in client.stream(timeout_s=30)] == ["once"]
        with local_service.client(session="mine") as client:
            assert client.collect(wait_s=0.0) == []  # it is acknowledged
        if restarted:
            local_service.brokers.stop("rollout")
            local_service.brokers.start_rollout_broker()
            with local_service.client() as client:
                until(lambda: len(client.status().stages) == 3, "all stage processes")
        again = ask(socket, request, codec.encode(job))
        assert (first.new, again.new, again.journal_id) == (1, 1, first.journal_id)
        with local_service.client(session="mine") as client:
            assert client.collect(wait_s=1.0) == []
            client.submit(job)  # as somebody who means it
            assert [one.job_id for one in client.stream(timeout_s=30)] == ["once"]
    finally:
        context.destroy(linger=0)
