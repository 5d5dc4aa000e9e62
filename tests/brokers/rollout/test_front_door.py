"""The front door without sockets: frames in, frames out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.journal.records import Finished, JobState, job_digest
from prorl_zmq.brokers.journal.segment_store import segment_paths
from prorl_zmq.brokers.rollout import front_door
from prorl_zmq.brokers.rollout.action_queue import perform_queue
from prorl_zmq.brokers.rollout.actions import Start
from prorl_zmq.brokers.rollout.batch_runner import BatchRunner
from prorl_zmq.brokers.rollout.front_door import FrontDoor
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.brokers.rollout.jobs import Jobs
from prorl_zmq.brokers.rollout.kept_blocks import KeptBlocks
from prorl_zmq.brokers.rollout.quota import Quota
from prorl_zmq.brokers.rollout.result_store import REDELIVER_S, ResultStore
from prorl_zmq.brokers.rollout.sized_cache import SizedCache
from prorl_zmq.brokers.rollout.task_catalog import TaskCatalog
from prorl_zmq.brokers.rollout.transition_log import TransitionLog
from prorl_zmq.brokers.rollout.write_ahead import WriteAhead
from prorl_zmq.config import RolloutBrokerSettings
from prorl_zmq.errors import InvalidJob
from prorl_zmq.security.rights import ANYBODY, Sender
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import MAX_FRAMES, PROTOCOL_VERSION, Done, KeyRole, Refused, new_id
from prorl_zmq.wire.messages.batches import BatchOptions, Feed, OpenBatch
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.messages.front_door import (
    Accepted,
    Cancel,
    Cancelled,
    Collect,
    Collected,
    FrontDoorReply,
    Hello,
    ServiceStatus,
    Status,
    Submit,
    Trace,
    Welcome,
)
from prorl_zmq.wire.messages.jobs import Job, Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import StageReport, StartPhase, Task
from prorl_zmq.wire.messages.watching import ListSteps

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_zmq.brokers.rollout.actions import Action
    from prorl_zmq.wire.messages.stages import StageCommand
    from prorl_zmq.wire.sockets import Frame

SAID = {"protocol": PROTOCOL_VERSION}
MATH = Task("math", {"problem": "str", "answer": "int"}, optional=("answer",))


class Door:
    """A front door in front of real pure objects, and the replies that it gave, by client."""

    def __init__(self, tasks: tuple[Task, ...] = (MATH,), max_jobs: int = 100, journal: Journal | None = None) -> None:
        settings = RolloutBrokerSettings(max_jobs=max_jobs, job_limit_bytes=2048)
        self.quota = Quota(max_jobs, settings.max_held_bytes, 1.0)
        self.table = JobTable(settings.lease_s, settings.ready_limit, settings.heartbeat_s)
        self.results = ResultStore()
        self.journal = journal or Journal()
        self.history = TransitionLog()
        self.writes = WriteAhead(self.journal, self.table, self.results, self.history, lambda action: None)
        self.catalog = TaskCatalog()
        self.catalog.add(tasks)
        self.now = 0.0
        self.news: set[str] = set()
        self.gone: set[bytes] = set()
        self.senders: dict[str, Sender] = {}
        """What has become of keys."""
        self.told: list[tuple[str, StageCommand]] = []
        """What stage processes were sent."""
        self.replies: dict[bytes, list[list[bytes]]] = {}
        self.jobs = Jobs(
            self.table, self.results, self.history, self.quota, self.writes, KeptBlocks(10.0), SizedCache(2**20)
        )
        self.batches = BatchRunner(self.jobs, self.catalog, settings.job_limit_bytes)
        self.door = FrontDoor(
            settings,
            "ipc://backends",
            self.jobs,
            self.catalog,
            self.batches,
            self.take_reply,
            lambda sender: self.senders.get(sender.user_id, sender),
            lambda stage_id, command: self.told.append((stage_id, command)),
            started_at=0.0,
        )

    def take_reply(self, frames: Sequence[Frame]) -> bool:
        client, *rest = [bytes(frame) for frame in frames]
        if client in self.gone:
            return False
        self.replies.setdefault(client, []).append(rest)
        return True

    def perform(self, actions: list[Action], at: float | None = None) -> None:
        self.jobs.queue.extend(actions)
        perform_queue(self.jobs, self.batches, self.now, self.now if at is None else at)

    def send(self, *frames: bytes, client: bytes = b"client", sender: Sender = ANYBODY) -> None:
        self.door.handle([client, b"", *frames], self.now, sender)
        self.perform([])
        self.writes.settle(self.now)

    def reply(self, client: bytes = b"client") -> Any:
        """The one reply that the client got since the last look."""
        ((delimiter, header, *blocks),) = self.replies.pop(client)
        assert delimiter == b""
        self.blocks = blocks
        return codec.decode(header, FrontDoorReply)

    def ask(self, request: Any, *frames: bytes, client: bytes = b"client") -> Any:
        self.send(codec.encode(request), *frames, client=client)
        return self.reply(client)

    def submit(self, *jobs: Job | bytes, session: str = "s") -> Any:
        frames = [job if isinstance(job, bytes) else codec.encode(job) for job in jobs]
        return msgspec.structs.replace(self.ask(Submit(new_id(), session), *frames), request_id="submit")

    def end(self, job_id: str, session: str = "s", block: bytes | None = None) -> None:
        """Have a job end, as if the pipeline had done it."""
        tokens = 1 if block is not None else 0
        result = Result(job_id=job_id, task="math", outcome=Outcome.COMPLETED, reward=1.0, tokens=tokens)
        finished = Finished(session, result, block, job_digest(codec.encode(job(job_id))))
        self.results.put(finished)
        self.quota.recovered(finished)
        self.news.add(session)

    def housekeep(self, now: float) -> None:
        self.now = now
        self.writes.settle(now)
        news, self.news = self.news | self.writes.take_news(), set()
        self.door.answer_held(news, now)

    def refusal(self, reply: Any) -> tuple[str, dict[str, Any]]:
        assert isinstance(reply, Refused)
        return reply.error.code, reply.error.fields


def job(job_id: str = "a", **instance: Any) -> Job:
    return Job(task="math", instance=instance or {"problem": "1 + 1"}, job_id=job_id)


def collect(
    *acknowledge: str, client_id: str = "me", wait_s: float = 0.0, max_results: int = 64, request_id: str = "collect"
) -> Collect:
    return Collect(request_id, "s", client_id, acknowledge, max_results=max_results, wait_s=wait_s)


def ids(reply: Any) -> list[str]:
    assert isinstance(reply, Collected)
    return [result.job_id for result in reply.results]


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "path"), [("load", "/weights"), ("end", ""), ("set", "")])
def test_weights_that_engines_serve_are_announced_to_batches(step: Any, path: str) -> None:
    door = Door()
    assert door.ask(WeightUpdate("w", step, 7, path)) == Done("w")
    assert [version for version, _ in door.ask(ListSteps("steps")).weights] == [7]


@pytest.mark.parametrize("step", ["begin", "cancel"])
def test_a_step_after_which_engines_do_not_serve_the_weights_is_not_for_the_front_door(step: Any) -> None:
    code, fields = (door := Door()).refusal(door.ask(WeightUpdate("w", step, 7)))
    assert (code, fields["field"]) == ("malformed_message", "$.step")


def test_a_model_that_waiting_prompts_or_instances_name_is_not_removed() -> None:
    door = Door((MATH, Task("game", {"players": "any"}, model_fields=("players.*.model",))))
    door.catalog.list_models(["policy", "a", "b"])
    door.ask(OpenBatch("open", "s", "batch", BatchOptions(target_groups=1, group_size=2)))
    assert door.ask(Feed("feed", "s", "batch", 0), codec.encode(msgspec.structs.replace(job(), models={"x": "a"})))
    door.submit(Job(task="game", instance={"players": {"0": {"model": "b"}}}, job_id="game"))
    for model, words in (("a", "0 unfinished jobs and 1 open batches"), ("b", "1 unfinished jobs and 0 open batches")):
        reply = door.ask(WeightUpdate("w", "remove", 0, model=model))
        assert door.refusal(reply)[0] == "model_in_use"
        assert words in reply.error.message
    assert door.ask(WeightUpdate("w", "remove", 0, model="c")) == Done("w")


def test_the_users_of_a_model_are_counted_without_reading_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.brokers.rollout.batch_runner.USERS_LIMIT", 2)
    door = Door()
    door.catalog.list_models(["policy", "adapter"])
    for number in range(6):
        model = "adapter" if number % 2 else "policy"
        door.submit(msgspec.structs.replace(job(), job_id=f"job-{number}", model=model))
    for record in door.table.records.values():
        record.decoded = None  # as after a restart of the broker
    reply = door.ask(WeightUpdate("w", "remove", 0, model="adapter"))
    assert "at least 2 unfinished jobs and 0 open batches use the model adapter" in reply.error.message
    assert sorted(one.job_id for one in door.table.records.values() if one.decoded) == ["job-1", "job-3"]
    assert door.ask(WeightUpdate("w2", "remove", 0, model="policy")).error.code == "model_in_use"


def test_a_model_whose_removal_is_refused_gets_jobs_again() -> None:
    door = Door()
    door.catalog.list_models(["policy", "a"])
    assert door.ask(WeightUpdate("w", "remove", 0, model="a")) == Done("w")
    door.catalog.list_models(["policy", "a"])
    with pytest.raises(InvalidJob, match="no backend serves the model 'a'"):
        door.catalog.check(msgspec.structs.replace(job(), model="a"))
    assert door.ask(WeightUpdate("w", "cancel", 0, model="a")) == Done("w")
    door.catalog.list_models(["policy", "a"])
    door.catalog.check(msgspec.structs.replace(job(), model="a"))


# Hello, status --------------------------------------------------------------------------------------------------------


def test_hello_says_what_a_client_has_to_know() -> None:
    reply = Door().ask(Hello("hello"))
    assert isinstance(reply, Welcome)
    assert (reply.request_id, reply.protocol) == ("hello", PROTOCOL_VERSION)
    assert (reply.backend_broker, reply.job_limit_bytes) == ("ipc://backends", 2048)


def test_another_protocol_version_is_refused_by_name() -> None:
    door = Door()
    code, fields = door.refusal(door.ask(Hello("hello", protocol=PROTOCOL_VERSION + 1)))
    assert (code, fields) == ("version_mismatch", {"ours": PROTOCOL_VERSION, "theirs": PROTOCOL_VERSION + 1})


def test_status_counts_what_the_service_holds() -> None:
    door = Door()
    door.table.stage_reported(
        StageReport(
            stage_id="init-1", role=Phase.INIT, node="local", slots=1, endpoint="ipc://stage", tasks=(Task("math"),)
        ),
        0.0,
    )
    door.submit(job("a"), job("b"))
    door.end("c")
    reply = door.ask(Status("status"))
    assert isinstance(reply, ServiceStatus)
    assert (reply.running[Phase.INIT], reply.queued[Phase.INIT], reply.uncollected) == (1, 1, 1)
    assert reply.tasks == ("math",)
    assert [(stage.stage_id, stage.busy) for stage in reply.stages] == [("init-1", 1)]


# Submit ---------------------------------------------------------------------------------------------------------------


def test_jobs_are_in_the_journal_when_they_are_accepted() -> None:
    door = Door()
    assert door.submit(job("a"), job("b")) == Accepted("submit", 2, door.journal.journal_id)
    assert [state.job_id for state in door.journal.recover().unfinished] == ["a", "b"]


def test_a_repeated_submit_adds_nothing() -> None:
    door = Door()
    door.submit(job("a"))
    assert door.submit(job("a"), job("b"), job("b")) == Accepted("submit", 1, door.journal.journal_id)
    door.perform(door.table.cancel("a", 0.0))
    assert door.submit(job("a")) == Accepted("submit", 0, door.journal.journal_id)
    assert len(door.table) == 1


def test_a_submit_that_is_sent_again_runs_nothing_though_its_result_was_collected() -> None:
    door = Door()
    request = Submit("sent-twice", "s")
    first = door.ask(request, codec.encode(job("a")))
    door.perform(door.table.cancel("a", 0.0))
    door.writes.settle(0.0)
    assert ids(door.ask(collect())) == ["a"]
    assert ids(door.ask(collect("a"))) == []
    assert door.ask(request, codec.encode(job("a"))) == first == Accepted("sent-twice", 1, door.journal.journal_id)
    assert len(door.table) == 0


@pytest.mark.parametrize("ended", [False, True])
def test_another_job_under_the_same_id_is_refused(ended: bool) -> None:
    door = Door()
    door.submit(job("a"))
    if ended:
        door.perform(door.table.cancel("a", 0.0))
    assert door.refusal(door.submit(job("a", problem="another"))) == ("duplicate_job", {"job_id": "a"})


@pytest.mark.parametrize(
    ("bad", "code", "fields"),
    [
        (Job(task="chess", instance={}, job_id="bad"), "unknown_task", {"task": "chess"}),
        (job("bad", answer=2), "invalid_job", {"job_id": "bad", "field": "problem"}),
        (job("bad", problem="1", colour="red"), "invalid_job", {"job_id": "bad", "field": "colour"}),
        (job("bad", problem=1), "invalid_job", {"job_id": "bad", "field": "problem"}),
        (job("bad", problem="1", answer="2"), "invalid_job", {"job_id": "bad", "field": "answer"}),
        (codec.pack({"task": "math", "job_id": "bad"}), "invalid_job", {"job_id": "bad", "field": "instance"}),
        (
            codec.pack({"task": "math", "job_id": "bad", "instance": {}, "max_attempts": 0}),
            "invalid_job",
            {"job_id": "bad", "field": "$.max_attempts"},
        ),
        (codec.pack({"task": "math", "job_id": 7}), "invalid_job", {"job_id": "", "field": "$.job_id"}),
        (codec.pack({"task": "math", "job_id": "../etc"}), "invalid_job", {"job_id": "../etc", "field": "$.job_id"}),
        (codec.pack([]), "invalid_job", {"job_id": "", "field": "$"}),
        (job("bad", problem="1" * 2048), "job_too_large", {"limit_bytes": 2048}),
        (b"\xc1", "malformed_message", {}),
        (b"\xdf\xff\xff\xff\xff", "malformed_message", {}),
        (job("good", problem="another"), "duplicate_job", {"job_id": "good"}),
    ],
)
def test_one_bad_job_and_none_is_accepted(bad: Job | bytes, code: str, fields: dict[str, Any]) -> None:
    door = Door()
    got, got_fields = door.refusal(door.submit(job("good"), bad))
    assert (got, {key: got_fields[key] for key in fields}) == (code, fields)
    assert len(door.table) == 0
    assert not door.journal.recover().unfinished


def test_the_refusal_of_a_wrong_instance_says_what_is_wrong() -> None:
    door = Door()
    reply = door.submit(job("bad", answer=2))
    assert reply.error.message == (
        "job bad: the instance of task math is wrong: Object missing required field `problem`"
    )
    reply = door.submit(job("bad", problem=3))
    assert reply.error.message == "job bad: the instance of task math is wrong: Expected `str`, got `int` in problem"


@pytest.mark.parametrize("state", ["unfinished", "ended"])
def test_an_id_of_another_session_is_taken(state: str) -> None:
    door = Door()
    if state == "unfinished":
        door.submit(job("a"), session="other")
    else:
        door.end("a", session="other")
    assert door.refusal(door.submit(job("a"))) == ("duplicate_job", {"job_id": "a"})


def test_a_full_service_is_busy_until_results_are_collected() -> None:
    door = Door(max_jobs=2)
    door.submit(job("a"))
    door.end("b")
    code, fields = door.refusal(door.submit(job("c")))
    assert code == "busy"
    assert fields["retry_after_s"] > 0
    assert door.submit(job("a")) == Accepted("submit", 0, door.journal.journal_id)  # a repeat takes no room
    door.ask(collect("b"))
    assert door.submit(job("c")) == Accepted("submit", 1, door.journal.journal_id)


def test_a_service_without_stage_processes_is_busy() -> None:
    door = Door(tasks=())
    assert door.refusal(door.submit(job()))[0] == "busy"


# Malformed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "request_id", "field"),
    [
        (b"", "unknown", None),
        (b"\xc1garbage", "unknown", None),
        (b"\xdf\xff\xff\xff\xff", "unknown", None),
        (codec.pack({"request_id": "me"}), "me", "type"),
        (codec.pack(SAID | {"request_id": "me", "type": "dance"}), "me", "$.type"),
        (codec.pack(SAID | {"request_id": "me", "type": "submit"}), "me", "session"),
        (codec.pack(SAID | {"request_id": "me", "type": "hello", "colour": 1}), "me", "colour"),
        (codec.pack({"request_id": "me", "type": "hello", "protocol": "1"}), "me", "$.protocol"),
        (codec.pack(SAID | {"request_id": 5, "type": "hello"}), "unknown", "$.request_id"),
    ],
)
def test_a_malformed_header_is_refused(header: bytes, request_id: str, field: str | None) -> None:
    _refused_as_malformed(header, request_id, field)


@pytest.mark.parametrize(("byte", "times"), [(b"\x91", 2**20), (b"\0", codec.HEADER_LIMIT_BYTES + 1)])
def test_a_large_malformed_header_is_refused(byte: bytes, times: int) -> None:
    _refused_as_malformed(times * byte, "unknown", None)


def _refused_as_malformed(header: bytes, request_id: str, field: str | None) -> None:
    door = Door()
    door.send(header)
    reply = door.reply()
    code, fields = door.refusal(reply)
    assert (code, reply.request_id, fields.get("field")) == ("malformed_message", request_id, field)


@pytest.mark.parametrize("request_", [Hello("r"), Status("r"), Cancel("r", ()), collect(request_id="r")])
def test_frames_where_none_belong_are_refused(request_: Any) -> None:
    door = Door()
    assert door.refusal(door.ask(request_, b"extra"))[0] == "malformed_message"


@pytest.mark.parametrize("frames", [[], [b"client"], [b"client", b""], [b"client", b"no delimiter"]])
def test_what_cannot_be_answered_is_dropped(frames: list[bytes]) -> None:
    door = Door()
    door.door.handle(frames, 0.0)
    assert door.replies == {}


def test_too_many_frames_are_refused() -> None:
    door = Door()
    door.door.handle([b"client", b"", *[b"x"] * (MAX_FRAMES + 1)], 0.0)
    assert door.refusal(door.reply())[0] == "malformed_message"


def test_the_whole_envelope_comes_back() -> None:
    door = Door()
    door.door.handle([b"client", b"correlation", b"", codec.encode(Hello("hello"))], 0.0)
    ((correlation, delimiter, _),) = door.replies[b"client"]
    assert (correlation, delimiter) == (b"correlation", b"")


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([b"", codec.encode(Submit("r", "s"))])), max_size=6))
def test_no_frames_bring_it_down(frames: list[bytes]) -> None:
    door = Door()
    door.door.handle(frames, 0.0)
    assert len(door.table) == 0
    for *_, header in door.replies.get(frames[0] if frames else b"", []):
        assert isinstance(codec.decode(header, FrontDoorReply), Refused | Accepted)


# Collect --------------------------------------------------------------------------------------------------------------


def test_results_come_with_their_blocks_in_order() -> None:
    door = Door()
    door.submit(job("d"))
    door.end("a", block=b"block of a")
    door.end("b")
    door.end("c", block=b"block of c")
    reply = door.ask(collect())
    assert (ids(reply), reply.remaining) == (["a", "b", "c"], 1)
    assert door.blocks == [b"block of a", b"block of c"]


def test_a_poll_is_held_until_a_result_comes() -> None:
    door = Door()
    door.send(codec.encode(collect(wait_s=10.0)))
    assert door.replies == {}
    assert door.door.next_deadline() == 10.0
    door.housekeep(1.0)
    assert door.replies == {}
    door.end("a")
    door.housekeep(2.0)
    assert ids(door.reply()) == ["a"]
    assert door.door.next_deadline() is None


def test_a_held_poll_is_answered_when_its_time_is_up() -> None:
    door = Door()
    door.send(codec.encode(collect(wait_s=10.0)))
    door.housekeep(9.9)
    assert door.replies == {}
    door.housekeep(10.0)
    assert ids(door.reply()) == []
    assert door.door.next_deadline() is None


def test_a_newer_poll_of_the_same_client_takes_the_place_of_the_held_one() -> None:
    door = Door()
    door.send(codec.encode(collect(wait_s=10.0)), client=b"before the restart")
    door.send(codec.encode(collect(wait_s=20.0)), client=b"after the restart")
    assert door.door.next_deadline() == 20.0
    door.end("a")
    door.housekeep(1.0)
    assert ids(door.reply(b"after the restart")) == ["a"]
    assert door.replies == {}


def test_two_clients_of_a_session_share_its_results() -> None:
    door = Door()
    for client in ("left", "right"):
        request = collect(client_id=client, wait_s=10.0, max_results=1)
        door.send(codec.encode(request), client=client.encode())
    door.end("a")
    door.end("b")
    door.housekeep(1.0)
    assert sorted(ids(door.reply(b"left")) + ids(door.reply(b"right"))) == ["a", "b"]


def test_results_in_a_lost_reply_are_given_again() -> None:
    door = Door()
    door.end("a", block=b"block")
    door.ask(collect())  # lost on the way
    assert ids(door.ask(collect())) == ["a"]
    assert door.blocks == [b"block"]
    assert ids(door.ask(collect("a"))) == []
    assert door.journal.recover().uncollected == []
    assert door.ask(collect(client_id="another")).results == ()


def test_results_that_reach_no_client_go_to_the_next_one_at_once() -> None:
    door = Door()
    door.gone.add(b"dead")
    door.send(codec.encode(collect(client_id="dead", wait_s=10.0)), client=b"dead")
    door.end("a")
    door.housekeep(1.0)
    assert ids(door.ask(collect(client_id="heir"))) == ["a"]


def test_what_remains_is_what_has_not_ended_or_not_been_taken() -> None:
    door = Door()
    door.submit(job("running"))
    door.end("a")
    door.end("b")
    assert door.ask(collect(max_results=1)).remaining == 2
    assert door.ask(collect("a", max_results=0)).remaining == 2
    assert door.ask(collect(max_results=1)).remaining == 1


def test_results_of_a_dead_client_go_to_the_next_one_of_its_session() -> None:
    door = Door()
    door.end("a")
    door.ask(collect(client_id="dead"))
    assert ids(door.ask(collect(client_id="heir"))) == []
    door.now = REDELIVER_S
    assert ids(door.ask(collect(client_id="heir"))) == ["a"]


def test_a_poll_for_no_results_only_acknowledges() -> None:
    door = Door()
    door.end("a")
    door.end("b")
    door.ask(collect())
    assert ids(door.ask(collect("a", max_results=0))) == []
    assert ids(door.ask(collect())) == ["b"]


def test_a_poll_that_names_its_jobs_gets_these_whoever_was_given_them() -> None:
    door = Door()
    for name in ("a", "b", "c"):
        door.end(name)
    door.end("theirs", session="other")
    assert ids(door.ask(collect(client_id="first"))) == ["a", "b", "c"]
    named = msgspec.structs.replace(collect(client_id="second"), job_ids=("c", "a", "theirs", "never"))
    for _ in range(2):
        reply = door.ask(named)
        assert (ids(reply), reply.remaining) == (["c", "a"], 1)
    assert ids(door.ask(collect(client_id="second"))) == []  # they are still the first one's
    assert ids(door.ask(collect("a", client_id="first"))) == ["b", "c"]
    assert ids(door.ask(named)) == ["c"]


def test_a_poll_that_names_its_jobs_is_held_until_one_has_ended() -> None:
    door = Door()
    door.submit(job("wanted"), job("other"))
    door.send(codec.encode(msgspec.structs.replace(collect(wait_s=5.0), job_ids=("wanted",))))
    for ended, answered in (("other", False), ("wanted", True)):
        door.ask(Cancel("cancel", (ended,)), client=b"another")
        door.housekeep(1.0)
        assert (b"client" in door.replies) == answered
    assert ids(door.reply()) == ["wanted"]


# Cancel ---------------------------------------------------------------------------------------------------------------


def test_cancel_says_what_became_of_each_id() -> None:
    door = Door()
    door.submit(job("running"))
    door.end("done")
    reply = door.ask(Cancel("cancel", ("running", "done", "never", "running")))
    assert reply == Cancelled("cancel", {"running": "cancelled", "done": "finished", "never": "unknown"})
    again = door.ask(Cancel("cancel", ("running",)))
    assert again == Cancelled("cancel", {"running": "finished"})
    (result,) = [result for result in door.ask(collect()).results if result.job_id == "running"]
    assert (result.outcome, result.reward) == (Outcome.CANCELLED, None)


def test_a_job_whose_result_was_collected_has_finished() -> None:
    door = Door()
    door.submit(job("collected"))
    door.ask(Cancel("cancel", ("collected",)))
    door.ask(collect())
    door.ask(collect("collected"))
    assert door.ask(Cancel("again", ("collected",))) == Cancelled("again", {"collected": "finished"})
    assert door.ask(Cancel("again", ("collected",), "s")) == Cancelled("again", {"collected": "unknown"})


def test_jobs_are_cancelled_and_traced_in_the_name_of_their_session_only() -> None:
    door = Door()
    door.submit(job("ours"))
    door.submit(job("theirs"), session="other")
    reply = door.ask(Cancel("cancel", ("ours", "theirs"), "s"))
    assert reply == Cancelled("cancel", {"ours": "cancelled", "theirs": "unknown"})
    assert door.ask(Trace("trace", "ours", "s")).outcome == "cancelled"
    assert door.refusal(door.ask(Trace("trace", "theirs", "s")))[0] == "unknown_job"
    assert door.refusal(door.ask(Trace("trace", "our", "s")))[0] == "unknown_job"  # no beginning of an id
    door.ask(collect("ours"))
    assert door.refusal(door.ask(Trace("trace", "ours", "s")))[0] == "unknown_job"
    assert door.ask(Trace("trace", "ours")).outcome == "cancelled"


# A fault of ours ------------------------------------------------------------------------------------------------------


def test_a_fault_of_ours_is_answered_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door()
    monkeypatch.setattr(door.journal, "accept", lambda *_: 1 / 0)
    door.send(codec.encode(Submit("submit", "s")), codec.encode(job()))
    assert door.refusal(door.reply())[0] == "internal_error"
    assert len(door.table) == 0
    assert "ZeroDivisionError" in caplog.text


def test_a_fetch_that_waits_ends_when_its_key_is_revoked() -> None:
    """What came later was given to it."""
    door = Door()
    door.submit(job())
    alice = Sender(KeyRole.TRAINER, "alice", "alices-key")
    door.send(codec.encode(Collect("collect", "s", "client", wait_s=60.0)), sender=alice)
    door.housekeep(1.0)
    assert door.replies == {}
    door.senders["alices-key"] = Sender(None, "alices-key", "alices-key", revoked=True)
    door.end("a")
    door.housekeep(2.0)
    reply = door.reply()
    assert isinstance(reply, Refused)
    assert (reply.error.code, reply.error.message) == ("not_allowed", "the key alice was revoked")
    assert len(door.results) == 1


def waiting(door: Door, **sender: Any) -> None:
    door.send(codec.encode(Trace("trace", "a", "s", wait_s=10.0)), **sender)
    assert door.replies == {}


def test_a_trace_is_held_until_the_rollout_has_an_address() -> None:
    door = Door()
    door.submit(job())
    door.history.note(Start("run-1", StartPhase(job_id="a", attempt=1, phase=Phase.RUN), b"", "n"), 0.0)
    waiting(door)
    assert door.door.next_deadline() == 10.0
    door.housekeep(1.0)
    assert door.replies == {}
    door.history.opened({"a": (1, "http://127.0.0.1:1/rollouts/a")})
    door.housekeep(2.0)
    assert door.reply().address == "http://127.0.0.1:1/rollouts/a"
    assert door.door.next_deadline() is None
    assert door.ask(Trace("again", "a", "s", wait_s=10.0)).address  # at once


def test_a_trace_that_waits_names_its_job_by_the_whole_id() -> None:
    door = Door()
    door.submit(job("abc"))
    assert door.ask(Trace("trace", "ab")).job_id == "abc"
    refused = door.ask(Trace("trace", "ab", wait_s=10.0))
    assert door.refusal(refused) == ("unknown_job", {"job_id": "ab", "matches": 0})
    assert "abc" not in refused.error.message


def test_a_held_trace_is_answered_when_its_time_is_up_or_its_job_ends() -> None:
    door = Door()
    door.submit(job())
    waiting(door)
    door.housekeep(10.0)
    assert (door.reply().address, door.door.next_deadline()) == ("", None)
    waiting(door)
    door.ask(Cancel("cancel", ("a",)), client=b"another")
    door.housekeep(11.0)
    assert door.reply().outcome == "cancelled"


def test_a_trace_that_waits_ends_when_its_key_is_revoked() -> None:
    door = Door()
    door.submit(job())
    waiting(door, sender=Sender(KeyRole.TRAINER, "alice", "alices-key"))
    door.senders["alices-key"] = Sender(None, "alices-key", "alices-key", revoked=True)
    door.housekeep(1.0)
    assert door.refusal(door.reply())[0] == "not_allowed"


def test_only_so_many_traces_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "TRACES_LIMIT", 1)
    door = Door()
    door.submit(job())
    waiting(door)
    assert door.refusal(door.ask(Trace("second", "a", "s", wait_s=10.0), client=b"another"))[0] == "busy"


def test_clients_of_two_sessions_may_have_one_name() -> None:
    """The second one's fetch took the place of the first one's, which was never answered."""
    door = Door()
    for session in ("left", "right"):
        door.send(codec.encode(Collect("collect", session, "client", wait_s=60.0)), client=session.encode())
    door.end("a", "left")
    door.housekeep(1.0)
    assert [result.job_id for result in door.reply(b"left").results] == ["a"]


def test_trajectory_that_the_journal_has_lost_is_told_for_its_job_alone(tmp_path: Path) -> None:
    with Journal(tmp_path / "rollout.journal") as journal:
        for number, job_id in enumerate("abc", 1):
            journal.accept([JobState(number, "s", job_id, "math", 60.0, codec.encode(job(job_id)))])
            result = Result(job_id=job_id, task="math", outcome=Outcome.COMPLETED, reward=1.0, tokens=1)
            journal.write([], [Finished("s", result, job_id.encode() * 1000, b"", number)], [])
    with Journal(tmp_path / "rollout.journal") as journal:
        door = Door(journal=journal)
        for finished in journal.recover().uncollected:
            door.results.put(finished)
            door.quota.recovered(finished)
        (file,) = segment_paths(tmp_path / "rollout.journal")
        with file.open("r+b") as behind:
            behind.seek(1500)
            behind.write(b"x")
        reply = door.ask(Collect(new_id(), "s", client_id="c"))
        assert [one.job_id for one in reply.results] == ["a", "b", "c"]
        assert [one.error.code if one.error is not None else "" for one in reply.results] == ["", "jobs_lost", ""]
        assert door.blocks == [b"a" * 1000, b"c" * 1000]
        door.ask(Collect(new_id(), "s", client_id="c", acknowledge=("a", "b", "c")))
        door.writes.settle(1.0)
        assert journal.recover().uncollected == []
