"""Requests for the turns of jobs that have not ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.rollout import turn_requests
from prorl_zmq.data.trajectory import Role, array_views
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import MalformedMessage
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import Refused
from prorl_zmq.wire.messages.front_door import FrontDoorReply
from prorl_zmq.wire.messages.jobs import BlockHandle, Phase
from prorl_zmq.wire.messages.stages import PhaseDone, ShowTurns, StageReport, TurnsShown
from prorl_zmq.wire.messages.watching import TURNS_WAIT_S, PeekTurns, TurnsPeeked, TurnsSoFar

from .test_front_door import MATH, Door, job

SO_FAR = TurnsSoFar(backend="engine-0", turns=1, tokens=3, shown_turns=1, shown_tokens=3)


def block(tokens: int = 3) -> bytes:
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.ASSISTANT)
    builder.add_context(np.arange(tokens, dtype=np.int32))
    return builder.block().tobytes()


def at_work(phase: Phase = Phase.RUN, **run: Any) -> Door:
    """A door with one job, `a`, that is held in a phase by the one process of its role; RUN brought `run`."""
    door = Door()
    for role in Phase:
        report = StageReport(
            stage_id=f"{role}-1",
            role=role,
            node="node-1",
            slots=1,
            endpoint="ipc://stage",
            tasks=(MATH,),
            welcomed=True,
        )
        door.perform(door.table.stage_reported(report, door.now))
    door.submit(job("a"))
    for done in Phase:
        if done == phase:
            break
        more = run if done == Phase.RUN else {}
        event = PhaseDone(stage_id=f"{done}-1", job_id="a", attempt=1, phase=done, **more)
        frame = block(more["tokens"]) if more and "kept" not in more else None
        door.perform(door.table.phase_done(event, frame, door.now))
    assert door.table.record("a").phase == phase
    return door


def ask(door: Door, client: bytes = b"client", **known: int) -> None:
    door.send(codec.encode(PeekTurns("turns", "a", **known)), client=client)


def shown(stage_id: str = "run-1", **more: Any) -> TurnsShown:
    return TurnsShown(stage_id=stage_id, job_id="a", attempt=1, **more)


def test_the_stage_process_is_asked_once_for_all_who_ask_the_same() -> None:
    door = at_work()
    for client in (b"one", b"two", b"two"):
        door.send(codec.encode(PeekTurns(f"by-{client.decode()}", "a")), client=client)
    ask(door, b"other", known_attempt=1, known_tokens=3)
    assert door.told == [
        ("run-1", ShowTurns(job_id="a", attempt=1)),
        ("run-1", ShowTurns(job_id="a", attempt=1, known_tokens=3)),
    ]
    assert door.replies == {}
    door.door.turns.shown(shown(so_far=SO_FAR), block())
    expected = TurnsPeeked(
        "by-one", job_id="a", attempt=1, phase=Phase.RUN, place="held", stage_id="run-1", node="node-1", so_far=SO_FAR
    )
    assert door.reply(b"one") == expected
    assert array_views(door.blocks[0], 3, 1).token_ids.tolist() == [0, 1, 2]
    assert door.reply(b"two") == replace(expected, request_id="by-two")
    assert door.replies == {}
    door.door.turns.shown(shown(known_tokens=3, so_far=TurnsSoFar(turns=1, tokens=3)), None)
    assert door.reply(b"other").so_far == TurnsSoFar(turns=1, tokens=3)
    assert door.blocks == []
    door.door.turns.shown(shown(so_far=SO_FAR), block())  # late, or never asked for
    assert door.replies == {}


def test_what_is_known_of_another_attempt_counts_as_nothing() -> None:
    door = at_work()
    ask(door, known_attempt=2, known_tokens=100)
    assert door.told == [("run-1", ShowTurns(job_id="a", attempt=1))]


def test_a_phase_that_the_process_does_not_have_is_about_to_begin_or_has_just_ended() -> None:
    door = at_work()
    ask(door)
    door.door.turns.shown(shown(), None)
    reply = door.reply()
    assert (reply.phase, reply.place, reply.so_far) == (Phase.RUN, "held", None)


def test_a_process_that_does_not_answer_is_named() -> None:
    door = at_work()
    ask(door)
    assert door.door.next_deadline() == TURNS_WAIT_S
    door.housekeep(TURNS_WAIT_S - 0.1)
    assert door.replies == {}
    door.housekeep(TURNS_WAIT_S)
    reply = door.reply()
    assert door.refusal(reply) == (
        "request_timeout",
        {"timeout_s": TURNS_WAIT_S, "stage_id": "run-1", "node": "node-1"},
    )
    assert "the task's code blocks it" in reply.error.message
    assert door.door.next_deadline() is None
    ask(door)
    assert len(door.told) == 2


@pytest.mark.parametrize("bad", [None, b"", block(4)])
def test_a_block_of_another_size_is_no_answer(bad: bytes | None) -> None:
    door = at_work()
    ask(door)
    with pytest.raises(MalformedMessage, match="do not have"):
        door.door.turns.shown(shown(so_far=SO_FAR), bad)
    door.door.turns.shown(shown("run-2", so_far=SO_FAR), block())  # who does not have the job
    assert door.replies == {}
    door.door.turns.shown(shown(so_far=SO_FAR), block())
    assert isinstance(door.reply(), TurnsPeeked)


def test_a_job_that_waits_or_is_in_init_has_no_turns() -> None:
    door = Door()
    door.submit(job("a"))
    ask(door)
    reply = door.reply()
    assert (reply.phase, reply.place, reply.node, reply.so_far) == (Phase.INIT, "queued", "", None)
    door = at_work(Phase.INIT)
    ask(door)
    reply = door.reply()
    assert (reply.phase, reply.place, reply.stage_id, reply.so_far) == (Phase.INIT, "held", "init-1", None)
    assert door.told == []


def test_of_a_job_in_eval_the_broker_has_the_turns() -> None:
    door = at_work(Phase.EVAL, tokens=3, turns=1, backend="engine-0")
    ask(door)
    reply = door.reply()
    assert (reply.phase, reply.so_far) == (Phase.EVAL, SO_FAR)
    assert array_views(door.blocks[0], 3, 1).token_ids.tolist() == [0, 1, 2]
    ask(door, known_attempt=1, known_tokens=3)
    assert (door.reply().so_far.shown_tokens, door.blocks) == (0, [])
    assert door.told == []


def test_of_a_job_in_eval_whose_node_keeps_the_turns_they_are_counted() -> None:
    handle = BlockHandle(node="node-1", block_id="b", checksum=0, endpoint="tcp://127.0.0.1:5")
    door = at_work(Phase.EVAL, tokens=3, turns=1, kept=handle)
    ask(door)
    assert (door.reply().so_far, door.blocks) == (TurnsSoFar(turns=1, tokens=3), [])


def test_an_ended_job_has_a_result_and_an_unknown_one_is_refused() -> None:
    door = Door()
    door.end("a")
    for job_id, ended, words in (("a", True, "ask for its result"), ("b", False, "not at work here")):
        reply = door.ask(PeekTurns("turns", job_id))
        assert isinstance(reply, Refused)
        assert (reply.error.code, reply.error.fields) == ("unknown_job", {"job_id": job_id, "ended": ended})
        assert words in reply.error.message


def test_so_many_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_requests, "HELD_LIMIT", 2)
    door = at_work()
    for client in (b"one", b"two", b"three"):
        door.send(codec.encode(PeekTurns(f"by-{client.decode()}", "a")), client=client)
    assert door.refusal(door.reply(b"three"))[0] == "busy"
    door.door.turns.shown(shown(so_far=SO_FAR), block())
    assert {client: type(codec.decode(frames[0][1], FrontDoorReply)) for client, frames in door.replies.items()} == {
        b"one": TurnsPeeked,
        b"two": TurnsPeeked,
    }
